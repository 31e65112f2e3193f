// --shard full: the whole weights of two buckets at a time, gathered from all ranks' shards before use.
//
// Bucket b is in slot b % 2. Passes visit buckets in sequence, so the next bucket's slot is free as soon as
// the model uses only the current bucket. The gather then overlaps the model's products. Every rank enqueues
// the same gathers in the same order, because all ranks' passes are the same.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/reducer/reducer.h"
#include "trainer/model/vit.h"

namespace gradwire {

class WeightWindow {
 public:
  static constexpr int kSlots = 2;
  using Programs = std::vector<std::unique_ptr<Program>>;

  // Allocates the slots. `gathers`: bound programs by bucket, which write into the slots. `dense`: the same
  // programs in FP32, to count their bytes. `model` uses its weights on `compute`, in layout(). All arguments
  // must outlive the object.
  WeightWindow(Communicator& comm, const Stream& compute, const Reducer& reducer, Vit& model,
               const Programs& gathers, const Programs& dense);
  // Waits for gathers in flight. After a failure, abort the communicator first.
  ~WeightWindow();
  WeightWindow(const WeightWindow&) = delete;

  // Returns the offsets of the model's weights in the slots.
  static ParameterLayout layout(const Reducer& reducer);
  // Returns the offset of a bucket's first element in layout().
  static int64_t offset(const Reducer& reducer, size_t bucket);

  // Vit's EnterBlock: makes the model wait for the weights of `block`, and starts to gather the weights of
  // `next`.
  void enter_block(int block, int next);
  // Starts to gather the first bucket of the next forward. Call when the ops enqueued so far on the model's
  // stream have changed this rank's shards.
  void changed();
  // Visits each bucket in turn, as the model would use it.
  void visit(const std::function<void(const float* weights, int64_t count)>& each);
  void synchronize() const { stream_.synchronize(); }

  // Return the bytes this rank has sent so far: in the chosen format, and in FP32.
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t dense_bytes() const { return dense_bytes_; }

 private:
  int bucket_of(int block) const { return reducer_.bucket_of(blocks_[static_cast<size_t>(block)]); }
  void use(int bucket);
  void fetch(int bucket);

  struct Slot {
    int bucket = -1;  // -1 if the slot is out of date
    Event gathered;
  };

  const Stream compute_, transfers_, stream_;
  const Reducer& reducer_;
  Vit& model_;
  const Programs &gathers_, &dense_;
  const std::vector<int> blocks_;
  Event free_;
  std::array<Slot, kSlots> slots_;
  uint64_t bytes_sent_ = 0, dense_bytes_ = 0;
};

}  // namespace gradwire
