// A launch: its limits and schedules, the memory saved between schedules, the log, and the watchdog.
#include <fmt/format.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "tests/simt/engine.h"

namespace gradwire::simt {
namespace {

constexpr size_t kMaxShared = 227 * 1024;  // bytes per block on sm_90
// shorter than the tests' time limit, so that the watchdog names the kernel
constexpr unsigned kWatchdogSeconds = 280;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  uint64_t value = std::strtoull(text, &end, 10);
  if (*end != '\0') throw Failure(std::string(name) + "='" + text + "' is not a number");
  return value;
}

// --- messages ---

void write_text(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

// Writes a message and the running kernel's name. Uses write() and snprintf(), because the signal handlers
// below must not allocate.
void write_running_kernel(const char* what) {
  if (block.grid == nullptr) return;
  char text[512];
  std::snprintf(text, sizeof text,
                "simt: %s in kernel '%s', block (%u,%u,%u), thread (%u,%u,%u), seed %llu\n", what,
                block.grid->kernel, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z,
                static_cast<unsigned long long>(options().seed));
  write_text(text);
}

void on_sanitizer_death() {
  write_running_kernel("the error above is");
}

void on_alarm(int) {
  write_running_kernel("hang: no end after many seconds");
  _exit(1);
}

void install_handlers() {
  static bool installed = false;
  if (installed) return;
  installed = true;
  __sanitizer_set_death_callback(on_sanitizer_death);
  static char stack[64 * 1024];  // the alarm may arrive on a fiber's small stack
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  stack_t present{};
  if (sigaltstack(nullptr, &present) == 0 && (present.ss_flags & SS_DISABLE))
    sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_handler = on_alarm;
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGALRM, &action, nullptr);
}

// --- log ---

// Counts the launches of a kernel for the log. At exit, the file in GRADWIRE_TEST_LOG gets one tab-separated
// line per completed kernel: start of the function in the executable (hexadecimal, as nm prints it), name
// given to launch(), number of launches, maximum threads per block, maximum bytes of dynamic shared memory.
// tools/checks/check_kernel_table.py reads the file.
struct Record {
  std::string name;
  int64_t launches = 0;
  size_t threads = 0, shared_bytes = 0;
};

std::map<const void*, Record>& records() {
  static auto* all = new std::map<const void*, Record>();
  return *all;
}

extern "C" const char executable_begin[] __asm__("__ehdr_start");

void write_log() {
  const char* path = std::getenv("GRADWIRE_TEST_LOG");
  if (path == nullptr || *path == '\0') return;
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "simt: cannot write GRADWIRE_TEST_LOG=%s\n", path);
    _exit(1);
  }
  for (const auto& [address, record] : records()) {
    std::fprintf(file, "%" PRIxPTR "\t%s\t%lld\t%zu\t%zu\n",
                 reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(executable_begin),
                 record.name.c_str(), static_cast<long long>(record.launches), record.threads,
                 record.shared_bytes);
  }
  std::fclose(file);
}

void note(const Grid& grid) {
  if (records().empty()) std::atexit(write_log);
  Record& record = records()[grid.kernel_address];
  record.name = grid.kernel;
  ++record.launches;
  record.threads = std::max(record.threads, size_t{grid.block.x} * grid.block.y * grid.block.z);
  record.shared_bytes = std::max(record.shared_bytes, grid.shared_bytes);
}

// --- memory ---

// All allocations into which a word of the kernel's parameters points.
class Memory {
 public:
  explicit Memory(std::span<const std::span<const std::byte>> parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      for (size_t at = 0; at + sizeof(void*) <= parameters[i].size(); at += sizeof(void*)) {
        void* pointer = nullptr;
        std::memcpy(&pointer, parameters[i].data() + at, sizeof pointer);
        if (is_mapped(pointer)) add(i, pointer);
      }
    }
  }

  // Saves the memory after the first schedule. Throws if the memory differs after a later schedule.
  void compare(const std::string& launch) {
    for (auto& [begin, region] : regions_) {
      if (region.outcome == nullptr) {
        region.outcome = save(begin, region.bytes);
        continue;
      }
      size_t at = first_difference(begin, region.outcome.get(), region.bytes);
      if (at == region.bytes) continue;
      throw Failure(fmt::format(
          "{}: the result depends on the order in which threads run. Two schedules left different bits, "
          "first {} "
          "bytes after the pointer in parameter {} (counted from 0). Is a barrier missing, a shared value "
          "uninitialized, or a sum unordered?",
          launch, static_cast<char*>(begin) + at - static_cast<char*>(region.pointer), region.parameter));
    }
  }

  void restore() {
    for (auto& [begin, region] : regions_) copy_unchecked(begin, region.before.get(), region.bytes);
  }

 private:
  using Bytes = std::unique_ptr<unsigned char[]>;
  struct Region {
    size_t parameter;  // the kernel's parameter that points to the allocation
    void* pointer;
    size_t bytes;
    Bytes before, outcome;
  };
  // Returns whether the pointer's page is mapped. Filters words cheaply: most words are counts and floats,
  // and AddressSanitizer looks up unknown addresses slowly.
  static bool is_mapped(void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address < uintptr_t{1} << 32 || address >= uintptr_t{1} << 48) return false;
    auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    unsigned char resident = 0;
    return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
  }
  void add(size_t parameter, void* pointer) {
    char name[64] = "";
    void* begin = nullptr;
    size_t size = 0;
    std::string_view kind = __asan_locate_address(pointer, name, sizeof name, &begin, &size);
    if ((kind == "heap" || kind == "stack" || kind == "global") && begin != nullptr && size > 0) {
      auto [place, added] = regions_.try_emplace(begin, Region{parameter, pointer, size, nullptr, nullptr});
      if (added) place->second.before = save(begin, size);
    }
  }
  static Bytes save(const void* data, size_t bytes) {
    Bytes copy(new unsigned char[bytes]);
    copy_unchecked(copy.get(), data, bytes);
    return copy;
  }
  std::map<void*, Region> regions_;
};

// --- launch ---

// Whether this thread runs a kernel. Other threads may launch meanwhile: they wait in Session.
thread_local bool runs_kernel = false;

void check_limits(const Grid& grid) {
  auto refuse = [&](const std::string& why) {
    throw Failure(fmt::format("launch of '{}' refused: {}", grid.kernel, why));
  };
  if (runs_kernel) refuse("kernels cannot launch kernels here");
  size_t threads = size_t{grid.block.x} * grid.block.y * grid.block.z;
  if (threads == 0) refuse("a block has no threads");
  if (threads > 1024 || grid.block.z > 64) {
    refuse(
        fmt::format("{} threads in a block ({} in z); CUDA allows 1024, and 64 in z", threads, grid.block.z));
  }
  if (grid.grid.x > 0x7fffffffu || grid.grid.y > 65535 || grid.grid.z > 65535) {
    refuse(fmt::format("the grid is {} x {} x {}; CUDA allows 2^31-1 x 65535 x 65535", grid.grid.x,
                       grid.grid.y, grid.grid.z));
  }
  if (grid.shared_bytes > kMaxShared) {
    refuse(fmt::format("{} bytes of dynamic shared memory; sm_90 has 227 KB", grid.shared_bytes));
  }
}

uint64_t hash(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (unsigned char c : text) h = (h ^ c) * 0x100000001b3u;
  return h;
}

// Returns the random numbers for a launch's schedule.
Random random_for(const Grid& grid, int repetition) {
  const uint64_t blocks = uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  return {options().seed ^ hash(grid.kernel) ^ blocks << 40 ^ static_cast<uint64_t>(repetition) << 56};
}

void* dynamic_memory = nullptr;

// Returns the size in bytes permitted by allow_dynamic_shared(). Thread-safe.
size_t allowed_shared(const void* kernel, size_t at_least = 0) {
  static std::mutex mutex;
  static auto* all = new std::map<const void*, size_t>();
  std::lock_guard lock(mutex);
  size_t& bytes = (*all)[kernel];
  return bytes = std::max(bytes, at_least);
}

// Checks the block's shared memory size after the block has run, when the size of its static variables is
// known.
void check_shared(const Grid& grid) {
  const size_t total = grid.shared_bytes + static_shared_bytes;
  const char* why = nullptr;
  if (total > kMaxShared) {
    why = "sm_90 has 227 KB";
  } else if (total > 48 * 1024 && allowed_shared(grid.kernel_address) < grid.shared_bytes) {
    why = "above 48 KB CUDA wants allow_dynamic_shared() first";
  }
  if (why != nullptr) {
    throw Failure(fmt::format("launch of '{}' refused: {} bytes of shared memory, {} of them static; {}",
                              grid.kernel, total, static_shared_bytes, why));
  }
}

// Runs the blocks in the order first, first + step, ... modulo the number of blocks. Runs each block exactly
// once, since the step and the number of blocks are coprime.
void run_schedule(const Grid& grid, int repetition, void (*thread)(const void*), const void* arguments) {
  uint64_t count = uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  Random random = random_for(grid, repetition);
  uint64_t step = 1 + random.next() % count, at = random.next() % count;
  while (std::gcd(step, count) != 1) ++step;
  block.grid = &grid;
  block.thread_main = thread;
  block.arguments = arguments;
  block.dynamic_memory = dynamic_memory;
  for (uint64_t done = 0; done < count; ++done, at = (at + step) % count) {
    block.index = {static_cast<unsigned>(at % grid.grid.x),
                   static_cast<unsigned>(at / grid.grid.x % grid.grid.y),
                   static_cast<unsigned>(at / grid.grid.x / grid.grid.y)};
    static_shared_bytes = 0;
    begin_block(random, static_cast<uint64_t>(repetition) + at);
    if (!run_block()) throw Failure(describe_launch() + ": " + block.failure);
    check_shared(grid);
  }
}

// Holds the lock, the signal handlers and the watchdog of a launch. Launches run one at a time.
class Session {
 public:
  Session() : lock_(one_at_a_time()) {
    runs_kernel = true;
    install_handlers();
    alarm(kWatchdogSeconds);
  }
  ~Session() {
    alarm(0);
    runs_kernel = false;
    block.grid = nullptr;
    block.dynamic_memory = nullptr;
  }
  Session(const Session&) = delete;

 private:
  static std::mutex& one_at_a_time() {
    static std::mutex mutex;
    return mutex;
  }
  std::lock_guard<std::mutex> lock_;
};

}  // namespace

Options& options() {
  static Options chosen{.seed = from_environment("GRADWIRE_TEST_SEED", 1)};
  return chosen;
}

void* dynamic_shared() {
  return block.dynamic_memory;
}

void run(const Grid& grid, void (*thread)(const void*), const void* arguments,
         std::span<const std::span<const std::byte>> parameters) {
  check_limits(grid);
  Session session;
  struct Dynamic {
    // Allocates exactly the requested size, so that AddressSanitizer detects accesses past the end.
    explicit Dynamic(size_t bytes) {
      if (bytes > 0 && posix_memalign(&dynamic_memory, 16, bytes) != 0) throw std::bad_alloc();
    }
    ~Dynamic() {
      std::free(dynamic_memory);
      dynamic_memory = nullptr;
    }
  } dynamic(grid.shared_bytes);
  Memory memory(parameters);
  for (int repetition = 0; repetition < options().schedules; ++repetition) {
    if (repetition > 0) memory.restore();
    run_schedule(grid, repetition, thread, arguments);
    if (options().schedules > 1) memory.compare(fmt::format("{}, seed {}", describe(grid), options().seed));
  }
  note(grid);
}

int64_t launches(const std::string& kernel) {
  int64_t total = 0;
  for (const auto& [address, record] : records()) {
    if (record.name == kernel) total += record.launches;
  }
  return total;
}

}  // namespace gradwire::simt

namespace gradwire::cuda {
int multiprocessors() {
  return simt::options().multiprocessors;
}

size_t max_shared_bytes() {
  return simt::kMaxShared;
}
int resident_blocks(const void*, int threads, size_t) {
  return 2048 / threads;
}
void allow_dynamic_shared(const char*, const void* kernel, size_t bytes) {
  simt::allowed_shared(kernel, bytes);
}
}  // namespace gradwire::cuda
