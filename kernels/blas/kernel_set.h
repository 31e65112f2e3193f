// Selects OpenBLAS's kernel set (x86-64) by the processor's features rather than its model.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

namespace gradwire::blas {

enum class Level { base, avx2, avx512 };

// A kernel set by OpenBLAS's name, and the instructions that it needs.
struct KernelSet {
  std::string_view name;
  Level level;
};
inline constexpr KernelSet kKernelSets[] = {
    {"Prescott", Level::base},   {"Haswell", Level::avx2},      {"Zen", Level::avx2},
    {"SkylakeX", Level::avx512}, {"Cooperlake", Level::avx512}, {"SapphireRapids", Level::avx512},
};

// Returns the level that the processor and the operating system support.
inline Level level_of_processor() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd")) {
    return Level::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Level::avx2;
#endif
  return Level::base;
}

// Returns the kernel set to run instead of OpenBLAS's choice; null: the choice suits the processor.
inline const char* better_kernels(std::string_view chosen, Level processor) {
  const auto* const set = std::ranges::find(kKernelSets, chosen, &KernelSet::name);
  // Sets that are not listed are older than AVX2.
  if ((set == std::end(kKernelSets) ? Level::base : set->level) >= processor) return nullptr;
  return processor == Level::avx512 ? "SkylakeX" : "Haswell";
}

}  // namespace gradwire::blas
