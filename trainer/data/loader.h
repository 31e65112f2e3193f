// Gives one rank its batches: sharded, shuffled by seed, augmented, normalized, and on the device before the
// step asks for them.
//
// Epoch e visits the images in a permutation that depends on (seed, e) alone, so it is the same on every
// rank. Global batch i is a contiguous run of world * batch_size positions of it; rank r takes the r-th
// batch_size of them. The last incomplete group of batches is dropped in training (drop_last) and handed out
// in smaller batches in evaluation. Nothing depends on timing: same options, same batches.
//
// A batch lives in a slot, memory of the device at a fixed address. Slots go round: the k-th batch that this
// loader hands out is in slot k % slots. So with slots = 2 x batches per step, each step of the same parity
// finds its batches at the same addresses, and all of its batches at once: what a captured graph needs.
//
//   loading thread    wait until slot k is released | fill it | on CUDA: enqueue the copy on a stream of its
//                     own, behind the release, and mark its end
//   next(stream)      wait (host) until slot k is filled; the stream waits for the mark
//   release(stream)   slot k is free once `stream` has passed this point
//
// So batch k + 1 is read, augmented and copied while batch k trains. On the host a slot is filled in place
// and there is nothing to copy; on CUDA each slot has a page-locked twin that the thread fills.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/device.h"
#include "trainer/data/dataset.h"

namespace gradwire {

struct LoaderOptions {
  int rank = 0, world = 1;
  int64_t batch_size = 1;  // images per rank and batch
  int64_t group = 1;       // batches per optimizer step: an epoch is cut to a multiple of it (drop_last only)
  bool shuffle = true;
  bool drop_last = true;
  Augmentation augment = {};
  uint64_t seed = 0;               // of the order and of augmentation
  int64_t first_batch = 0;         // where to begin: batches of whole epochs before, and of this one
  int64_t slots = 2;               // batches in flight, at least 2 to load one while another trains
  Device device = Device::host();  // where batches go
};

class Loader {
 public:
  // Memory of the loader's, until release().
  struct Batch {
    const float* images = nullptr;    // (count, channels, height, width), normalized
    const int32_t* labels = nullptr;  // (count)
    int64_t count = 0;                // batch_size in training; in evaluation maybe less, even 0, at the end
    int64_t slot = 0;                 // 0 .. slots - 1
  };

  // `data` outlives the loader. Throws BadInput when an epoch would have no batch.
  Loader(const Dataset& data, LoaderOptions options);
  // Streams that were given to next() and release() are done with the batches by now.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Batches per epoch, the same on every rank.
  int64_t batches_per_epoch() const;

  // The next batch, which later work on `stream` may read. Blocks only if the loading thread is behind. After
  // an epoch's last batch the next epoch begins. Throws Error when all slots are taken and none is released:
  // it would wait for ever.
  Batch next(const Stream& stream);
  // Frees the batch that was taken first of those not yet released, behind what `stream` was given so far.
  void release(const Stream& stream);

  // Which images batch `batch` of epoch `epoch` holds for this rank, in order. Pure; what next() follows.
  std::vector<int64_t> indices(int64_t epoch, int64_t batch) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// What Loader::batches_per_epoch() would say.
int64_t batches_per_epoch(const Dataset& data, const LoaderOptions& options);

// The permutation of 0..count-1 that epoch `epoch` uses.
std::vector<int64_t> epoch_permutation(int64_t count, uint64_t seed, int64_t epoch);

}  // namespace gradwire
