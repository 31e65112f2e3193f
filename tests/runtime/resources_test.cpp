#include "runtime/threads/thread.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "runtime/device/device.h"
#include "tests/support/expect.h"

// Returns the sanitizer options. By default, the sanitizers abort on an allocation of this size. The option
// makes the allocation fail instead.
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace gradwire {
namespace {

// Sets the default stack size of threads, in bytes, during its lifetime.
struct DefaultStack {
  explicit DefaultStack(size_t bytes) {
    pthread_getattr_default_np(&before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, bytes);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  ~DefaultStack() { pthread_setattr_default_np(&before); }
  pthread_attr_t before;
};

TEST(Resources, ThreadsHaveTwoMegabytesOfStackForEveryLimit) {
  DefaultStack small(size_t{128} << 10);
  size_t stack = 0;
  Thread thread("a thread of the test", [&] {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    pthread_attr_destroy(&attributes);
  });
  thread.join();
  EXPECT_GE(stack, size_t{2} << 20);
}

TEST(Resources, ThreadCreationErrorsNameTheLimits) {
  DefaultStack huge(size_t{1} << 46);  // bytes, more than the address space
  bool ran = false;
  try {
    Thread thread("a thread of the test", [&] { ran = true; });
    FAIL() << "a stack of 64 TiB";
  } catch (const OutOfResources& error) {
    const std::string text = error.what();
    testing::expect_has(text, {"cannot start a thread of the test", "GRADWIRE_THREADS"});
  }
  EXPECT_FALSE(ran);
}

TEST(Resources, DescriptorErrorsNameTheLimit) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const std::string text = error_text(EMFILE);
  testing::expect_has(text, {std::to_string(limit.rlim_cur), "ulimit -n"});
  EXPECT_EQ(error_text(ECONNREFUSED), std::strerror(ECONNREFUSED));
}

TEST(Resources, ThrowsOutOfResourcesWhenHostMemoryIsExhausted) {
  EXPECT_THROW(Buffer(Device::host(), size_t{1} << 60), OutOfResources);
}

// Imitates a constructor that has enqueued work on its memory when a later allocation fails.
TEST(Resources, MemoryFreedByAnExceptionOutlivesEnqueuedWork) {
  constexpr size_t kBytes = size_t{64} << 20;  // large enough for free() to unmap it
  const Stream stream = Stream::create(Device::host(), "test");
  std::atomic<bool> dropped = false;
  try {
    const Buffer memory(Device::host(), kBytes);
    stream.submit([&dropped, data = memory.data()] {
      while (!dropped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::memset(data, 1, kBytes);
    });
    throw Error("the constructor fails");
  } catch (const Error&) {
  }
  dropped = true;
  EXPECT_NO_THROW(stream.synchronize());
}

}  // namespace
}  // namespace gradwire
