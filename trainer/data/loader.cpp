#include "trainer/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "kernels/error.h"
#include "kernels/math/random.h"

namespace gradwire {
namespace {

constexpr uint64_t kShuffleStream =
    0x5348'0001;  // the generator's stream; the epoch is in the counter's upper half

}  // namespace

std::vector<int64_t> epoch_permutation(int64_t count, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (int64_t i = count - 1; i > 0; --i) {  // Fisher and Yates
    Random4 bits =
        philox(seed, kShuffleStream, static_cast<uint64_t>(epoch) << 40 | static_cast<uint64_t>(i));
    uint64_t j = static_cast<uint64_t>(bits.v[0]) * static_cast<uint64_t>(i + 1) >> 32;
    std::swap(order[static_cast<size_t>(i)], order[j]);
  }
  return order;
}

int64_t batches_per_epoch(const Dataset& data, const LoaderOptions& options) {
  const int64_t global = options.batch_size * options.world;
  return options.drop_last ? data.count() / (global * options.group) * options.group
                           : (data.count() + global - 1) / global;
}

// The loading thread fills slots in ring order; next() hands them out in the same order. A slot is refilled
// when the copy out of it is done, which its event says.
class Loader::Impl {
 public:
  Impl(const Dataset& data, LoaderOptions options) : data_(data), options_(options) {
    if (options.world < 1 || options.rank < 0 || options.rank >= options.world || options.batch_size < 1 ||
        options.group < 1 || options.prefetch < 1 || options.first_batch < 0) {
      throw BadInput("Loader: rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) +
                     ", batches of " + std::to_string(options.batch_size) + " in groups of " +
                     std::to_string(options.group) + " make no sense");
    }
    const int64_t global = options.batch_size * options.world;
    batches_ = gradwire::batches_per_epoch(data, options);
    if (batches_ == 0) {
      throw BadInput(data.name + ": its " + std::to_string(data.count()) + " images are fewer than the " +
                     std::to_string(global * options.group) + " of one step (" +
                     std::to_string(options.batch_size) + " per rank and batch, " +
                     std::to_string(options.world) + " ranks, " + std::to_string(options.group) +
                     " batches); lower --batch-size");
    }
    for (int32_t c = 0; c < data.channels; ++c) {
      scale_.push_back(1.0f / (255.0f * data.stddev[static_cast<size_t>(c)]));
      shift_.push_back(-data.mean[static_cast<size_t>(c)] / data.stddev[static_cast<size_t>(c)]);
    }
    slots_.resize(static_cast<size_t>(options.prefetch) + 1);  // one more, whose copy is under way
    size_t image_bytes = static_cast<size_t>(options.batch_size * data.image_elements()) * sizeof(float);
    size_t label_bytes = static_cast<size_t>(options.batch_size) * sizeof(int32_t);
    for (Slot& slot : slots_) {
      slot.images =
          options.device.is_cuda() ? Buffer::pinned(image_bytes) : Buffer(Device::host(), image_bytes);
      slot.labels =
          options.device.is_cuda() ? Buffer::pinned(label_bytes) : Buffer(Device::host(), label_bytes);
      slot.copied = Event::create(options.device);
    }
    thread_ = std::thread([this] { work(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  int64_t batches() const { return batches_; }

  int64_t next(const Stream& stream, float* images, int32_t* labels) {
    if (stream.device() != options_.device) {
      throw BadInput("Loader::next: the stream is on " + stream.device().name() +
                     ", the loader was made for " + options_.device.name());
    }
    Slot& slot = slots_[next_slot_];
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return slot.full || error_; });
      if (!slot.full) std::rethrow_exception(error_);
    }
    int64_t count = slot.count;
    copy(stream, images, slot.images.data(),
         static_cast<size_t>(count * data_.image_elements()) * sizeof(float));
    copy(stream, labels, slot.labels.data(), static_cast<size_t>(count) * sizeof(int32_t));
    slot.copied.record(stream);
    {
      std::lock_guard lock(mutex_);
      slot.full = false;
    }
    changed_.notify_all();
    next_slot_ = (next_slot_ + 1) % slots_.size();
    return count;
  }

  // Positions [begin, end) of the epoch's order that are this rank's part of `batch`.
  std::pair<int64_t, int64_t> range(int64_t batch) const {
    int64_t begin = (batch * options_.world + options_.rank) * options_.batch_size;
    int64_t end = std::min(begin + options_.batch_size, data_.count());
    return {std::min(begin, data_.count()), end};
  }

  std::vector<int64_t> order(int64_t epoch) const {
    if (options_.shuffle) return epoch_permutation(data_.count(), options_.seed, epoch);
    std::vector<int64_t> identity(static_cast<size_t>(data_.count()));
    std::iota(identity.begin(), identity.end(), int64_t{0});
    return identity;
  }

 private:
  struct Slot {
    Buffer images, labels;
    int64_t count = 0;
    Event copied;
    bool full = false;  // guarded by mutex_; whoever sees its value of it owns the rest
  };

  void work() {
    try {
      size_t at = 0;
      int64_t first = options_.first_batch % batches_;
      for (int64_t epoch = options_.first_batch / batches_;; ++epoch, first = 0) {
        std::vector<int64_t> positions = order(epoch);
        for (int64_t batch = first; batch < batches_; ++batch, at = (at + 1) % slots_.size()) {
          Slot& slot = slots_[at];
          {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stop_ || !slot.full; });
            if (stop_) return;
          }
          slot.copied.synchronize();
          fill(slot, positions, batch);
          {
            std::lock_guard lock(mutex_);
            slot.full = true;
          }
          changed_.notify_all();
        }
      }
    } catch (...) {  // a stream that failed; next() passes it on
      std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  void fill(Slot& slot, const std::vector<int64_t>& positions, int64_t batch) {
    auto [begin, end] = range(batch);
    slot.count = std::max<int64_t>(0, end - begin);
    int64_t plane = int64_t{1} * data_.height * data_.width;
    float* images = slot.images.as<float>();
    int32_t* labels = slot.labels.as<int32_t>();
    for (int64_t i = 0; i < slot.count; ++i) {
      int64_t image = positions[static_cast<size_t>(begin + i)];
      labels[i] = data_.labels[static_cast<size_t>(image)];
      for (int32_t c = 0; c < data_.channels; ++c) {
        const uint8_t* from = data_.images.data() + image * data_.image_elements() + c * plane;
        float* to = images + i * data_.image_elements() + c * plane;
        float scale = scale_[static_cast<size_t>(c)], shift = shift_[static_cast<size_t>(c)];
        for (int64_t p = 0; p < plane; ++p) to[p] = static_cast<float>(from[p]) * scale + shift;
      }
    }
  }

  const Dataset& data_;
  const LoaderOptions options_;
  int64_t batches_ = 0;
  std::vector<float> scale_, shift_;  // pixel * scale + shift is normalized
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;  // of the caller of next()

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

Loader::Loader(const Dataset& data, LoaderOptions options) : impl_(std::make_unique<Impl>(data, options)) {}
Loader::~Loader() = default;
int64_t Loader::batches_per_epoch() const {
  return impl_->batches();
}
int64_t Loader::next(const Stream& stream, float* images, int32_t* labels) {
  return impl_->next(stream, images, labels);
}

std::vector<int64_t> Loader::indices(int64_t epoch, int64_t batch) const {
  std::vector<int64_t> positions = impl_->order(epoch);
  auto [begin, end] = impl_->range(batch);
  if (begin >= end) return {};
  return {positions.begin() + begin, positions.begin() + end};
}

}  // namespace gradwire
