// Gives one rank its batches: sharded, shuffled by seed, normalized, and loaded ahead of the step by a
// thread.
//
// Epoch e visits the images in a permutation that depends on (seed, e) alone, so it is the same on every
// rank. Global batch i is a contiguous run of world * batch_size positions of it; rank r takes the r-th
// batch_size of them. The last incomplete group of batches is dropped in training (drop_last) and handed out
// in smaller batches in evaluation. Nothing depends on timing: same options, same batches.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/device.h"
#include "trainer/data/dataset.h"

namespace gradwire {

struct LoaderOptions {
  int rank = 0, world = 1;
  int64_t batch_size = 1;  // images per rank and batch
  int64_t group = 1;       // batches per optimizer step: an epoch is cut to a multiple of it (drop_last only)
  bool shuffle = true;
  bool drop_last = true;
  uint64_t seed = 0;
  int64_t first_batch = 0;         // where to begin: batches of whole epochs before, and of this one
  int prefetch = 2;                // batches loaded ahead
  Device device = Device::host();  // where next() copies to; for CUDA the staging memory is page-locked
};

class Loader {
 public:
  // `data` outlives the loader. Throws BadInput when an epoch would have no batch.
  Loader(const Dataset& data, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Batches per epoch, the same on every rank.
  int64_t batches_per_epoch() const;

  // Copies the next batch, in stream order, to memory of options.device: normalized images
  // (n, channels, height, width) and labels (n). Returns n: batch_size in training; in evaluation maybe less,
  // even 0, in the last batches of an epoch. Blocks only if the loading thread is behind. After an epoch's
  // last batch the next epoch begins. The stream outlives the loader or is synchronized before it goes.
  int64_t next(const Stream& stream, float* images, int32_t* labels);

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
