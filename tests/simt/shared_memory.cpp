// Poisons shared memory when a block starts. On a GPU, shared memory holds the previous block's values.
//
// A `__shared__` variable is a static here. Its declaration provides only a source location (see the macro in
// simt.h), because a macro in front of a declaration cannot know the variable's name. AddressSanitizer knows
// the address and size: at start-up, GCC's code passes the address, size and source line of every static to
// __asan_register_globals. The linker's --wrap lets this file see those calls.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tests/simt/engine.h"

namespace gradwire::simt {
namespace {

// Copies the layout of GCC's libsanitizer (asan_interface_internal.h, __asan_global).
struct SourceLocation {
  const char* file;
  int line, column;
};
struct Global {
  uintptr_t begin;
  size_t bytes, bytes_with_redzone;
  const char* name;
  const char* module;
  uintptr_t has_dynamic_init;
  SourceLocation* location;
  uintptr_t odr_indicator;
};

// Stores the registered statics in a plain array, which is filled before this program's constructors run.
struct Registered {
  const Global* globals;
  size_t count;
};
constexpr size_t kMaxModules = 1024;
Registered modules[kMaxModules];
size_t module_count = 0;

struct Instance {
  void* data;
  size_t bytes;
};
struct Variable {
  std::vector<Instance> instances;  // one entry per instantiation of the declaring template
  int64_t poisoned_in = 0;          // serial number of the last block that poisoned the variable
};

// Adds the statics that are declared on a line. Redzones separate the compiler's records, so instrumented
// standard-library code must not read them.
void add_instances(Variable& variable, const char* file, int line) {
  for (size_t m = 0; m < module_count; ++m) {
    for (size_t i = 0; i < modules[m].count; ++i) {
      const Global& g = modules[m].globals[i];
      if (g.location == nullptr || g.location->line != line || std::strcmp(g.location->file, file) != 0)
        continue;
      if (std::strcmp(g.name, "gw_simt_site") == 0) continue;  // the macro's own static on the same line
      Instance instance{reinterpret_cast<void*>(g.begin), g.bytes};
      variable.instances.push_back(instance);
    }
  }
}

Variable& find(const char* file, int line) {
  static std::map<std::pair<std::string, int>, Variable> by_place;
  Variable& variable = by_place[{file, line}];
  if (variable.instances.empty()) add_instances(variable, file, line);
  return variable;
}

}  // namespace

uint32_t poison_word = 0;
size_t static_shared_bytes = 0;

void SharedSite::enter() {
  if (entry == nullptr) {
    Variable& variable = find(file, line);
    if (variable.instances.empty()) {
      fail(fmt::format(
          "cannot find the shared variable declared at {}:{}: write `__shared__ T name[N];` on one line",
          file, line));
    }
    entry = &variable;
  }
  auto& variable = *static_cast<Variable*>(entry);
  if (variable.poisoned_in == block.serial) return;
  variable.poisoned_in = block.serial;
  size_t largest = 0;  // bytes of the largest instantiation, because the entered instantiation is unknown
  for (const Instance& i : variable.instances) {
    fill_unchecked(i.data, i.bytes, poison_word);
    largest = std::max(largest, i.bytes);
  }
  static_shared_bytes += largest;
}

extern "C" void __real___asan_register_globals(void* globals, uintptr_t count);
extern "C" void __wrap___asan_register_globals(void* globals, uintptr_t count) {
  if (module_count < kMaxModules) modules[module_count++] = {static_cast<const Global*>(globals), count};
  __real___asan_register_globals(globals, count);
}

// Prevents GCC from turning loops into calls of memset and memcpy, which the sanitizer checks.
#define GW_UNCHECKED __attribute__((noinline, optimize("no-tree-loop-distribute-patterns")))

GW_UNCHECKED void fill_unchecked(void* data, size_t bytes, uint32_t word) {
  auto* out = static_cast<unsigned char*>(data);
  size_t i = 0;
  if (reinterpret_cast<uintptr_t>(out) % 4 == 0) {
    for (; i + 4 <= bytes; i += 4) *reinterpret_cast<uint32_t*>(out + i) = word;
  }
  for (; i < bytes; ++i) out[i] = static_cast<unsigned char>(word >> 8 * (i % 4));
}

GW_UNCHECKED void copy_unchecked(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  for (size_t i = 0; i < bytes; ++i) {
    if (out[i] != in[i]) out[i] = in[i];
  }
}

GW_UNCHECKED size_t first_difference(const void* a, const void* b, size_t bytes) {
  const auto* x = static_cast<const unsigned char*>(a);
  const auto* y = static_cast<const unsigned char*>(b);
  size_t i = 0;
  while (i < bytes && x[i] == y[i]) ++i;
  return i;
}

}  // namespace gradwire::simt
