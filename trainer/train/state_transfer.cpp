#include "trainer/train/state_transfer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "collectives/transport/transport.h"
#include "runtime/device/device_cuda.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

// Bytes per exchange. Each exchange has a separate deadline.
constexpr size_t kPieceBytes = size_t{32} << 20;

class StateTransfer {
 public:
  StateTransfer(const RankState& rank, const std::vector<int>& joiners)
      : transport_(rank.comm.transport()), joiners_(joiners) {
    for (int r = 0; r < transport_.world(); ++r) {
      if (!is_new(r)) senders_.push_back(r);
    }
  }

  bool joins() const { return is_new(transport_.rank()); }

  // Transfers `bytes` from the senders to the joiners, in pieces. `bytes` must have the same size on all
  // ranks.
  void send(std::span<std::byte> bytes) {
    for (size_t begin = 0; begin < bytes.size(); begin += kPieceBytes) {
      send_piece(bytes.subspan(begin, std::min(kPieceBytes, bytes.size() - begin)));
    }
  }

 private:
  bool is_new(int rank) const { return std::find(joiners_.begin(), joiners_.end(), rank) != joiners_.end(); }

  void send_piece(std::span<std::byte> piece) {
    std::vector<Transfer> transfers;
    for (size_t s = 0; s < senders_.size(); ++s) {
      const size_t begin = piece.size() * s / senders_.size(), end = piece.size() * (s + 1) / senders_.size();
      if (begin == end) continue;
      if (joins()) {
        transfers.push_back({Transfer::Kind::receive, senders_[s], piece.data() + begin, end - begin});
      } else if (senders_[s] == transport_.rank()) {
        for (const int to : joiners_) {
          transfers.push_back({Transfer::Kind::send, to, piece.data() + begin, end - begin});
        }
      }
    }
    const ExchangeLabel label{mix(0x68616e64, pieces_++), "the state of a rank that joins"};
    const Call call{mix(label.tag, piece.size()), label.what};
    const Stream now = Stream::immediate_host();
    transport_.begin_call(now, call);
    transport_.exchange(now, transfers, label);
  }

  Transport& transport_;
  const std::vector<int>& joiners_;
  std::vector<int> senders_;
  uint64_t pieces_ = 0;
};

std::span<std::byte> bytes_of(float* values, int64_t count) {
  return std::as_writable_bytes(std::span<float>(values, static_cast<size_t>(count)));
}

}  // namespace

void transfer_state(const RankState& rank, const std::vector<int>& joiners) {
  StateTransfer transfer(rank, joiners);
  transfer.send(bytes_of(rank.weights.data, rank.layout.elements));
  int64_t owned = 0;
  for (const ElementRange& part : rank.parts) owned += part.count();
  for (const FlatState& moment : rank.moments) transfer.send(bytes_of(moment.values.data, owned));

  std::vector<TensorState> states = rank.reducer.tensor_state();
  std::erase_if(states, [](const TensorState& state) { return !state.same_on_all_ranks; });
  size_t all = 0;
  for (const TensorState& state : states) all += static_cast<size_t>(state.bytes());
  std::vector<std::byte> values(all);
  const FinishOnError finish(rank.stream);
  const auto each = [&](auto&& what) {
    size_t at = 0;
    for (const TensorState& state : states) {
      const auto bytes = static_cast<size_t>(state.bytes());
      what(state, std::span(values).subspan(at, bytes));
      at += bytes;
    }
    rank.stream.synchronize();
  };
  if (!transfer.joins()) {
    each([&](const TensorState& state, std::span<std::byte> to) { state.read(rank.stream, 0, to); });
  }
  transfer.send(values);
  if (transfer.joins()) {
    each([&](const TensorState& state, std::span<std::byte> from) { state.write(rank.stream, 0, from); });
  }
}

}  // namespace gradwire
