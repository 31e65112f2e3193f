#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include <gradwire/gradwire.h>
#include "runtime/util/hash.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

void require_ok(gw_status status) {
  if (status != GW_OK) throw std::logic_error(gw_last_error());
}

// The reducer of rank 0 in a world of two threads. Rank 1 takes part only in the reducer's creation.
class Reducer {
 public:
  Reducer() {
    std::thread other([this] { join(1, other_comm_, other_); });
    join(0, comm_, reducer_);
    other.join();
    size_t size = 0;
    require_ok(gw_reducer_state_save(reducer_, nullptr, 0, &size));
    fresh_.resize(size);
    require_ok(gw_reducer_state_save(reducer_, fresh_.data(), fresh_.size(), &size));
  }
  ~Reducer() {
    for (gw_reducer reducer : {reducer_, other_}) gw_reducer_destroy(reducer);
    for (gw_comm comm : {comm_, other_comm_}) gw_comm_destroy(comm);
  }

  const Bytes& fresh() const { return fresh_; }
  // Loads a state. Checks that a rejected state leaves the reducer unchanged.
  void load(const Bytes& state) {
    check(gw_reducer_state_load(reducer_, state.data(), state.size()));
    const void* const states[] = {state.data(), fresh_.data()};
    const size_t sizes[] = {state.size(), fresh_.size()};
    for (int32_t n : {1, 2}) check(gw_reducer_state_load_ranks(reducer_, states, sizes, n));
  }

 private:
  void check(gw_status status) {
    if (status == GW_OK) {
      require_ok(gw_reducer_state_load(reducer_, fresh_.data(), fresh_.size()));
      return;
    }
    if (status != GW_BAD_ARGUMENT) throw std::logic_error(gw_last_error());
    Bytes now(fresh_.size());
    size_t size = 0;
    require_ok(gw_reducer_state_save(reducer_, now.data(), now.size(), &size));
    if (now != fresh_) throw std::logic_error("a refused state changed the reducer");
  }

  static void join(int rank, gw_comm& comm, gw_reducer& reducer) {
    gw_comm_options options = {};
    options.size = sizeof options;
    options.rendezvous = "local://fuzz";
    options.rank = rank;
    options.world = 2;
    options.device = GW_HOST;
    options.timeout_ms = 60'000;
    require_ok(gw_comm_create(&options, &comm));
    gw_tensor tensors[] = {{sizeof(gw_tensor), "matrix", 12, 9, GW_FLOAT32, nullptr},
                           {sizeof(gw_tensor), "vector", 5, 1, GW_FLOAT32, nullptr}};
    require_ok(gw_reducer_create(comm, "powersgd:rank=2,min_ratio=1", tensors, 2, nullptr, &reducer));
  }

  gw_comm comm_ = nullptr, other_comm_ = nullptr;
  gw_reducer reducer_ = nullptr, other_ = nullptr;
  Bytes fresh_;
};

// Returns a reducer that is created on first use and shared by all inputs.
Reducer& reducer_of_two() {
  static Reducer reducer;
  return reducer;
}

}  // namespace

void state(Input input) {
  Reducer& reducer = reducer_of_two();
  Bytes bytes(input.begin(), input.end());
  reducer.load(bytes);
  // Tests the input also with a corrected size and checksum, which hide the damage. docs/checkpoints.md lists
  // the offsets.
  constexpr size_t kHeader = 40;
  if (bytes.size() < kHeader) return;
  const uint64_t size = bytes.size();
  const uint32_t crc = crc32(bytes.data() + kHeader, bytes.size() - kHeader);
  std::memcpy(bytes.data() + 12, &crc, sizeof crc);
  std::memcpy(bytes.data() + 16, &size, sizeof size);
  reducer.load(bytes);
}

std::vector<Bytes> state_seeds() {
  return {reducer_of_two().fresh()};
}

}  // namespace gradwire::fuzz
