// The backends on which an op's tests run: the host's fast path, CUDA if a device is visible, and, in the
// executable simt_tests, the same CUDA kernels compiled by g++ and run on the CPU (tests/simt). A test is
// written once:
//
//   class Gelu : public gradwire::testing::OpTest {};
//   TEST_P(Gelu, IsTheReference) { auto x = array<float>(n); ... GW_RUN(gelu, args); x.host() ... }
//   GW_INSTANTIATE_BACKENDS(Gelu);
#pragma once

#include <gtest/gtest.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/op.h"
#include "runtime/device/device.h"
#include "tests/support/devices.h"
#include "tests/support/normal.h"

namespace gradwire::testing {

struct Backend {
  std::string name;  // "host", "cuda0" or "simt"
  Device device;
  bool simt = false;  // memory is host memory, and ops call gradwire::cuda::op(nullptr, args)
};

inline std::vector<Backend> backends() {
#ifdef GRADWIRE_SIMT_TESTS
  return {{"simt", Device::host(), true}};
#else
  std::vector<Backend> list;
  for (Device d : available_devices()) list.push_back({device_label(d), d});
  return list;
#endif
}

// Memory on the backend's device between guard elements. All elements are poisoned, so that tests detect
// unwritten elements and out-of-bounds writes. `misalign` shifts the start by that many elements from
// 256-byte alignment.
template <typename T>
class Array {
 public:
  Array(const Stream& stream, int64_t count, int64_t misalign = 0)
      : stream_(stream), count_(count), begin_(kGuard + misalign), storage_(stream.device(), bytes_all()) {
    poison();
  }
  Array(const Stream& stream, const std::vector<T>& values, int64_t misalign = 0)
      : Array(stream, static_cast<int64_t>(values.size()), misalign) {
    set(values);
  }
  T* data() const { return storage_.template as<T>() + begin_; }
  int64_t size() const { return count_; }
  void set(const std::vector<T>& values) { to_device(stream_, data(), std::span<const T>(values)); }
  std::vector<T> host() const { return to_host(stream_, static_cast<const T*>(data()), count_); }
  void poison() {
    std::vector<unsigned char> bytes(bytes_all(), kPoison);
    forbid_guards(false);
    to_device(stream_, storage_.template as<unsigned char>(), std::span<const unsigned char>(bytes));
    forbid_guards(true);
  }
  // Expects the guards on both sides to be unchanged.
  void expect_guards_intact(const char* what) const {
    forbid_guards(false);
    auto all =
        to_host(stream_, storage_.template as<const unsigned char>(), static_cast<int64_t>(bytes_all()));
    forbid_guards(true);
    size_t begin = static_cast<size_t>(begin_) * sizeof(T),
           end = begin + static_cast<size_t>(count_) * sizeof(T);
    for (size_t i = 0; i < all.size(); ++i) {
      if (i == begin) i = end;
      if (i < all.size() && all[i] != kPoison) {
        ADD_FAILURE() << what << ": byte " << static_cast<int64_t>(i) - static_cast<int64_t>(begin)
                      << " relative to its start was written, outside its " << end - begin << " bytes";
        return;
      }
    }
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xcd;
  void forbid_guards([[maybe_unused]] bool forbid) const {
#ifdef __SANITIZE_ADDRESS__
    if (!storage_.device().is_host()) return;
    auto* all = storage_.template as<unsigned char>();
    size_t begin = static_cast<size_t>(begin_) * sizeof(T),
           end = begin + static_cast<size_t>(count_) * sizeof(T);
    auto* change = forbid ? __asan_poison_memory_region : __asan_unpoison_memory_region;
    change(all, begin);
    change(all + end, bytes_all() - end);
#endif
  }
  size_t bytes_all() const {
    return static_cast<size_t>(count_ + begin_ + kGuard) * sizeof(T);
  }
  Stream stream_;
  int64_t count_, begin_;
  Buffer storage_;
};

// Fixture of a test on one backend.
class OpFixture {
 public:
  explicit OpFixture(const Backend& backend)
      : stream(backend.simt ? Stream::immediate_host() : Stream::create(backend.device, "test")) {}
  template <typename T>
  Array<T> array(int64_t count, int64_t misalign = 0) {
    return Array<T>(stream, count, misalign);
  }
  template <typename T>
  Array<T> array(const std::vector<T>& values, int64_t misalign = 0) {
    return Array<T>(stream, values, misalign);
  }
  static std::vector<float> normal(int64_t count, uint32_t seed, float scale = 1.0f) {
    return testing::normal(count, seed, scale);
  }

  Stream stream;
};

class OpTest : public ::testing::TestWithParam<Backend>, public OpFixture {
 public:
  OpTest() : OpFixture(GetParam()) {}
};

// Returns sizes, in elements, that vector loops often process incorrectly.
inline std::vector<int64_t> awkward_sizes() {
  return {0, 1, 7, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4099};
}

}  // namespace gradwire::testing

// Runs op(args) on the test's backend and waits for the op.
#ifdef GRADWIRE_SIMT_TESTS
#define GW_RUN(op, args) ::gradwire::cuda::op(nullptr, args)
#else
#define GW_RUN(op, args)                \
  do {                                  \
    ::gradwire::op(this->stream, args); \
    this->stream.synchronize();         \
  } while (false)
#endif

#define GW_INSTANTIATE_BACKENDS(Suite)                                 \
  INSTANTIATE_TEST_SUITE_P(                                            \
      On, Suite, ::testing::ValuesIn(::gradwire::testing::backends()), \
      [](const ::testing::TestParamInfo<::gradwire::testing::Backend>& info) { return info.param.name; })
