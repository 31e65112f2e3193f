// Prefetches one rank's batches: sharded, shuffled by seed, augmented, normalized and copied to the device.
//
// Epoch e visits the images in a permutation that depends only on (seed, e), so the permutation is the same
// on every rank. Global batch i is a contiguous run of world * batch_size (or global_batch) positions of the
// permutation; rank r takes the r-th part. Training drops the last incomplete group of batches (drop_last).
// Evaluation returns this group as smaller batches. Nothing depends on timing: same options, same batches.
//
// A batch is in a slot, device memory at a fixed address. Slots form a ring: the loader's k-th batch is in
// slot k % slots. With slots = 2 x batches per step, all batches of a step are available at once, and every
// second step has them at the same addresses, as a captured graph requires.
//
//   loading thread    wait until slot k is released | fill it | on CUDA: enqueue the copy on a copy stream,
//                     after the release, and record an event
//   next(stream)      wait (host) until slot k is filled; the stream waits for the event
//   release(stream)   slot k is free once `stream` has passed this point
//
// So batch k + 1 is read, augmented and copied while batch k trains. On the host a slot is filled in place,
// without a copy. On CUDA each slot has a pinned staging buffer that the thread fills.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"

namespace gradwire {

struct LoaderOptions {
  int rank = 0, world = 1;
  int64_t batch_size = 1;  // images per rank and batch
  // Images per batch over all ranks; need not be a multiple of the number of ranks. Ranks' parts differ by at
  // most one image, and batch_size is the largest part. 0 means world * batch_size.
  int64_t global_batch = 0;
  int64_t group = 1;  // batches per optimizer step; with drop_last an epoch has a multiple of `group` batches
  bool shuffle = true;
  bool drop_last = true;
  Augmentation augment = {};
  uint64_t seed = 0;        // seed of the order and augmentation
  int64_t first_batch = 0;  // batches to skip, counted across epochs
  int64_t slots = 2;        // batches in flight; at least 2, to load a batch while another batch trains
  Device device = Device::host();  // memory of the batches
};

class Loader {
 public:
  // A batch in memory that the loader owns. Valid until release().
  struct Batch {
    const float* images = nullptr;    // (count, channels, height, width), normalized
    const int32_t* labels = nullptr;  // (count)
    int64_t count = 0;                // images of this rank; fewer at the end of an evaluation, possibly 0
    int64_t slot = 0;                 // 0 .. slots - 1
  };

  // Starts to load the first batches. `data` must outlive the loader. Throws BadInput when an epoch would
  // have no batch.
  Loader(const Dataset& data, LoaderOptions options);
  // Stops the loading thread. The streams given to next() and release() must have finished with the batches.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Returns the number of batches per epoch, the same on every rank.
  int64_t batches_per_epoch() const { return batches_; }

  // Returns the next batch, which later work on `stream` may read. Blocks only if the loading thread is
  // behind. After the last batch of an epoch, returns the first batch of the next epoch. Throws Error when
  // all slots are in use.
  Batch next(const Stream& stream);
  // Frees the oldest unreleased batch, once `stream` has finished the work enqueued so far.
  void release(const Stream& stream);

  // Returns the indices of the images in this rank's batch `batch` of epoch `epoch`, in the order of next().
  std::vector<int64_t> indices(int64_t epoch, int64_t batch) const;

 private:
  struct Slot {
    Buffer images, labels;                // returned by next()
    Buffer staged_images, staged_labels;  // filled by the loading thread; on the host the same buffers
    int64_t count = 0;
    Event copied, released;
    // Whether the slot has a batch; guarded by mutex_. If true, the caller owns the other members, otherwise
    // the loading thread.
    bool full = false;
  };

  bool copies() const { return options_.device.is_cuda(); }
  void check_device(const Stream& stream, const char* what) const;
  // Returns the positions [begin, end) of the epoch's order that are this rank's part of `batch`.
  std::pair<int64_t, int64_t> range(int64_t batch) const;
  std::vector<int64_t> order(int64_t epoch) const;
  void load_batches();  // the loading thread
  void fill(Slot& slot, int64_t epoch, const std::vector<int64_t>& positions, int64_t batch);

  const Dataset& data_;
  const LoaderOptions options_;
  int64_t batches_ = 0;
  std::vector<float> scale_, shift_;  // normalized = pixel * scale + shift
  std::vector<Slot> slots_;
  Stream copy_stream_;                // CUDA only
  int64_t taken_ = 0, released_ = 0;  // numbers of batches; used only by the caller's thread

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::exception_ptr error_;
  Thread thread_;
};

// Returns the number of images of a batch of `global` images that belong to rank `rank`.
inline int64_t part_of_batch(int64_t global, int rank, int world) {
  return global * (rank + 1) / world - global * rank / world;
}
// Returns Loader::batches_per_epoch() without a loader.
int64_t batches_per_epoch(const Dataset& data, const LoaderOptions& options);

// Returns the permutation of 0..count-1 for epoch `epoch`.
std::vector<int64_t> epoch_permutation(int64_t count, uint64_t seed, int64_t epoch);

// Flips and shifts of training images, drawn on demand.
//
// A draw is a pure function of (seed, epoch, index of the image in the data set). The draw is independent of
// ranks, batches, timing and the step from which a run resumed. Evaluation does not augment.

struct AugmentDraw {
  bool flip = false;       // horizontal
  int32_t dy = 0, dx = 0;  // pixel (y, x) of the crop is pixel (y + dy, x + dx) of the image; black outside
};

// Returns the padding for crops, in pixels: an eighth of the side, rounded up; 4 for 28 and 32 pixels. Crops
// equal torchvision's RandomCrop(side, padding): pad with zeros (black) before normalization, then take a
// window at a uniformly random offset.
int32_t crop_padding(int32_t side);

AugmentDraw draw_augmentation(const Augmentation& which, uint64_t seed, int64_t epoch, int64_t image,
                              int32_t height, int32_t width);

// Normalizes one channel of an image, (height, width): to[y][x] = pixel * scale + shift, where `pixel` is
// taken from the crop, flipped after cropping. Reads 1 byte and writes 4 bytes per pixel. No alignment
// required.
void normalize_plane(const uint8_t* pixels, int32_t height, int32_t width, const AugmentDraw& draw,
                     float scale, float shift, float* to);

}  // namespace gradwire
