#include "trainer/data/loader.h"

#include <algorithm>
#include <numeric>

#include "kernels/math/random.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr uint64_t kShuffleStream = 0x5348'0001;  // stream of the random generator

int64_t global_batch(const LoaderOptions& options) {
  return options.global_batch > 0 ? options.global_batch : options.batch_size * options.world;
}

}  // namespace

std::vector<int64_t> epoch_permutation(int64_t count, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (int64_t i = count - 1; i > 0; --i) {  // Fisher-Yates shuffle
    Random4 bits =
        philox(seed, kShuffleStream, static_cast<uint64_t>(epoch) << 40 | static_cast<uint64_t>(i));
    uint64_t j = static_cast<uint64_t>(bits.v[0]) * static_cast<uint64_t>(i + 1) >> 32;
    std::swap(order[static_cast<size_t>(i)], order[j]);
  }
  return order;
}

int64_t batches_per_epoch(const Dataset& data, const LoaderOptions& options) {
  const int64_t global = global_batch(options);
  return options.drop_last ? data.count() / (global * options.group) * options.group
                           : (data.count() + global - 1) / global;
}

Loader::Loader(const Dataset& data, LoaderOptions options) : data_(data), options_(options) {
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world || options.batch_size < 1 ||
      options.group < 1 || options.slots < 1 || options.first_batch < 0 ||
      global_batch(options) > options.batch_size * options.world) {
    throw BadInput(
        "Loader: invalid options: rank {} of {}, batches of {} ({} over all) in groups of {}, "
        "{} slots, first batch {}",
        options.rank, options.world, options.batch_size, options.global_batch, options.group, options.slots,
        options.first_batch);
  }
  const int64_t global = global_batch(options);
  batches_ = gradwire::batches_per_epoch(data, options);
  if (batches_ == 0) {
    throw BadInput(
        "{}: {} images are fewer than the {} of one step ({} per rank and batch, {} ranks, {} batches); "
        "lower --batch-size",
        data.name, data.count(), global * options.group, options.batch_size, options.world, options.group);
  }
  for (int32_t c = 0; c < data.channels; ++c) {
    scale_.push_back(1.0f / (255.0f * data.stddev[static_cast<size_t>(c)]));
    shift_.push_back(-data.mean[static_cast<size_t>(c)] / data.stddev[static_cast<size_t>(c)]);
  }
  const size_t image_bytes = static_cast<size_t>(options.batch_size * data.image_elements()) * sizeof(float);
  const size_t label_bytes = static_cast<size_t>(options.batch_size) * sizeof(int32_t);
  slots_.resize(static_cast<size_t>(options.slots));
  for (Slot& slot : slots_) {
    slot.images = Buffer(options.device, image_bytes);
    slot.labels = Buffer(options.device, label_bytes);
    slot.staged_images = copies() ? Buffer::pinned(options.device, image_bytes) : slot.images;
    slot.staged_labels = copies() ? Buffer::pinned(options.device, label_bytes) : slot.labels;
    slot.copied = Event::create(options.device);
    slot.released = Event::create(options.device);
  }
  if (copies()) copy_stream_ = Stream::create(options.device, "copy");
  thread_ = Thread("the thread that loads batches", [this] { load_batches(); });
}

Loader::~Loader() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  try {
    if (copies()) copy_stream_.synchronize();
  } catch (...) {  // other calls report the device's failure
  }
}

Loader::Batch Loader::next(const Stream& stream) {
  check_device(stream, "next");
  const size_t at = static_cast<size_t>(taken_ % options_.slots);
  Slot& slot = slots_[at];
  if (taken_ - released_ == options_.slots) {
    throw Error("Loader::next: all {} slots are taken", options_.slots);
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return slot.full || error_; });
    if (!slot.full) std::rethrow_exception(error_);
  }
  if (copies()) stream.wait(slot.copied);
  ++taken_;
  return {slot.images.as<float>(), slot.labels.as<int32_t>(), slot.count, static_cast<int64_t>(at)};
}

void Loader::release(const Stream& stream) {
  check_device(stream, "release");
  if (released_ == taken_) throw Error("Loader::release: no batch is taken");
  Slot& slot = slots_[static_cast<size_t>(released_ % options_.slots)];
  slot.released.record(stream);
  ++released_;
  {
    std::lock_guard lock(mutex_);
    slot.full = false;
  }
  changed_.notify_all();
}

std::pair<int64_t, int64_t> Loader::range(int64_t batch) const {
  const int64_t global = global_batch(options_);
  const int64_t begin = batch * global + global * options_.rank / options_.world;
  const int64_t end = std::min(begin + part_of_batch(global, options_.rank, options_.world), data_.count());
  return {std::min(begin, data_.count()), end};
}

std::vector<int64_t> Loader::order(int64_t epoch) const {
  if (options_.shuffle) return epoch_permutation(data_.count(), options_.seed, epoch);
  std::vector<int64_t> identity(static_cast<size_t>(data_.count()));
  std::iota(identity.begin(), identity.end(), int64_t{0});
  return identity;
}

void Loader::check_device(const Stream& stream, const char* what) const {
  if (stream.device() == options_.device) return;
  throw BadInput("Loader::{}: the stream is on {}, the loader's device is {}", what, stream.device().name(),
                 options_.device.name());
}

void Loader::load_batches() {
  try {
    size_t at = 0;
    int64_t first = options_.first_batch % batches_;
    for (int64_t epoch = options_.first_batch / batches_;; ++epoch, first = 0) {
      const std::vector<int64_t> positions = order(epoch);
      for (int64_t batch = first; batch < batches_; ++batch, at = (at + 1) % slots_.size()) {
        Slot& slot = slots_[at];
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return stop_ || !slot.full; });
          if (stop_) return;
        }
        // Wait until the slot's buffers have been read: by the copy, or on the host by the step.
        (copies() ? slot.copied : slot.released).synchronize();
        fill(slot, epoch, positions, batch);
        if (copies()) {
          copy_stream_.wait(slot.released);
          copy(copy_stream_, slot.images.data(), slot.staged_images.data(),
               static_cast<size_t>(slot.count * data_.image_elements()) * sizeof(float));
          copy(copy_stream_, slot.labels.data(), slot.staged_labels.data(),
               static_cast<size_t>(slot.count) * sizeof(int32_t));
          slot.copied.record(copy_stream_);
        }
        {
          std::lock_guard lock(mutex_);
          slot.full = true;
        }
        changed_.notify_all();
      }
    }
  } catch (...) {  // a stream failed; next() rethrows the exception
    std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

void Loader::fill(Slot& slot, int64_t epoch, const std::vector<int64_t>& positions, int64_t batch) {
  constexpr int64_t kGrainElements = 1 << 18;  // about 50 us of work
  auto [begin, end] = range(batch);
  slot.count = std::max<int64_t>(0, end - begin);
  const int64_t* order = positions.data() + begin;
  const int64_t plane = int64_t{1} * data_.height * data_.width, elements = data_.image_elements();
  auto fill_images = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t image = order[i];
      slot.staged_labels.as<int32_t>()[i] = data_.labels[static_cast<size_t>(image)];
      const AugmentDraw draw =
          draw_augmentation(options_.augment, options_.seed, epoch, image, data_.height, data_.width);
      for (int32_t c = 0; c < data_.channels; ++c) {
        normalize_plane(data_.images.data() + image * elements + c * plane, data_.height, data_.width, draw,
                        scale_[static_cast<size_t>(c)], shift_[static_cast<size_t>(c)],
                        slot.staged_images.as<float>() + i * elements + c * plane);
      }
    }
  };
  // On the host the model keeps the cores busy. With a GPU the cores are idle.
  const int64_t grain = std::max<int64_t>(1, kGrainElements / elements);
  if (copies() && slot.count > grain) {
    parallel_for(slot.count, grain, fill_images);
  } else {
    fill_images(0, slot.count);
  }
}

std::vector<int64_t> Loader::indices(int64_t epoch, int64_t batch) const {
  std::vector<int64_t> positions = order(epoch);
  auto [begin, end] = range(batch);
  if (begin >= end) return {};
  return {positions.begin() + begin, positions.begin() + end};
}

namespace {

constexpr uint64_t kAugmentStream = 0x4155'0001;  // stream of the random generator

GW_SIMD void normalize(const uint8_t* from, int64_t count, float scale, float shift, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]) * scale + shift;
}

// Normalizes a row of pixels and writes the values in reverse order. `to_end`: one past the last value, which
// belongs to the first pixel.
GW_SIMD void normalize_reversed(const uint8_t* from, int64_t count, float scale, float shift, float* to_end) {
  float* to = to_end - count;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[count - 1 - i]) * scale + shift;
}

int32_t uniform_below(uint32_t bits, int32_t end) {
  return static_cast<int32_t>(static_cast<uint64_t>(bits) * static_cast<uint64_t>(end) >> 32);
}

}  // namespace

int32_t crop_padding(int32_t side) {
  return (side + 7) / 8;
}

AugmentDraw draw_augmentation(const Augmentation& which, uint64_t seed, int64_t epoch, int64_t image,
                              int32_t height, int32_t width) {
  if (!which.any()) return {};
  const Random4 bits =
      philox(seed, kAugmentStream, static_cast<uint64_t>(epoch) << 40 | static_cast<uint64_t>(image));
  AugmentDraw draw;
  if (which.flip) draw.flip = (bits.v[0] >> 31) != 0;
  if (which.crop) {
    const int32_t up = crop_padding(height), left = crop_padding(width);
    draw.dy = uniform_below(bits.v[1], 2 * up + 1) - up;
    draw.dx = uniform_below(bits.v[2], 2 * left + 1) - left;
  }
  return draw;
}

void normalize_plane(const uint8_t* pixels, int32_t height, int32_t width, const AugmentDraw& draw,
                     float scale, float shift, float* to) {
  const int64_t plane = int64_t{1} * height * width;
  if (!draw.flip && draw.dy == 0 && draw.dx == 0) return normalize(pixels, plane, scale, shift, to);
  // Columns [begin, end) of each row of the crop are inside the image.
  const int32_t begin = std::clamp(-draw.dx, 0, width), end = std::clamp(width - draw.dx, begin, width);
  for (int32_t y = 0; y < height; ++y, to += width) {
    const int32_t from_y = y + draw.dy;
    if (from_y < 0 || from_y >= height) {
      std::fill_n(to, width, shift);  // black is 0, so 0 * scale + shift
      continue;
    }
    const uint8_t* from = pixels + int64_t{1} * from_y * width + (begin + draw.dx);
    if (draw.flip) {
      std::fill_n(to, width - end, shift);
      normalize_reversed(from, end - begin, scale, shift, to + (width - begin));
      std::fill_n(to + (width - begin), begin, shift);
    } else {
      std::fill_n(to, begin, shift);
      normalize(from, end - begin, scale, shift, to + begin);
      std::fill_n(to + end, width - end, shift);
    }
  }
}

}  // namespace gradwire
