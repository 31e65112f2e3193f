// Gradwire's part of libgradwire_blas.so: selects the kernels that OpenBLAS runs.
//
// When the library is loaded, OpenBLAS chooses by model number. Gradwire's first call corrects the choice
// before any product runs. The linker redirects the archive's calls of getenv to this file (--wrap), so the
// choice reaches OpenBLAS without changing the environment.
#include "kernels/blas/blas.h"

#include <cblas.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <cstddef>
#include <string>
#include <string_view>

#include "kernels/blas/kernel_set.h"

// OpenBLAS's internal symbols. They are not in its headers, but are unchanged since its first release with
// run-time dispatch. They are null if the archive holds only one kernel set.
extern "C" {
[[gnu::weak]] extern void* gotoblas;         // the kernel set in use
[[gnu::weak]] void gotoblas_dynamic_init();  // chooses the kernel set, unless `gotoblas` is set

void* __real_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
char* __real_getenv(const char* name);
char* __wrap_getenv(const char* name);
}

namespace {

using namespace gradwire::blas;

char* core_type = nullptr;  // the value that OpenBLAS reads

void run(const char* kernels) {
  if (&gotoblas_dynamic_init == nullptr) return;
  core_type = const_cast<char*>(kernels);
  gotoblas = nullptr;
  gotoblas_dynamic_init();
}

struct Library : GradwireBlas {
  Library() : GradwireBlas{} {
    // Example of the version text: "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..."; the options are removed.
    version_text = openblas_get_config();
    version_text.resize(std::min(version_text.find(' ', version_text.find(' ') + 1), version_text.size()));
    version = version_text.c_str();
    if (const char* set = __real_getenv("GRADWIRE_BLAS_KERNELS")) wanted = (wanted_text = set).c_str();
    const Level processor = level_of_processor();
    if (wanted != nullptr) {
      run_wanted(processor);
    } else if (const char* better = better_kernels(openblas_get_corename(), processor)) {
      instead_of_text = openblas_get_corename();
      run(better);
      if (openblas_get_corename() != instead_of_text) instead_of = instead_of_text.c_str();
    }
    kernels = openblas_get_corename();
  }

  // Selects the kernel set that `wanted` names. Reports an error if OpenBLAS lacks the set or the processor
  // cannot run it.
  void run_wanted(Level processor) {
    std::string names;
    for (const KernelSet& set : kKernelSets) {
      if (set.level > processor) continue;
      names += (names.empty() ? "" : ", ") + std::string(set.name);
      if (set.name != wanted_text) continue;
      run(wanted);
      if (openblas_get_corename() == set.name) return;
    }
    error_text = "GRADWIRE_BLAS_KERNELS=" + wanted_text + ": " + version_text +
                 " has no such kernels for this processor; unset it, or use one of " + names;
    error = error_text.c_str();
  }

  std::string version_text, wanted_text, instead_of_text, error_text;
};

// The return point of a product when the system refuses memory; null outside products.
thread_local jmp_buf* way_out = nullptr;
// The size of the last refused mapping; 0 once memory is available again.
std::atomic<size_t> refused_bytes{0};

// Returns whether memory is available again. Each refusal uses up an entry of OpenBLAS's table of buffers, so
// a refused product is retried only when memory is available.
bool memory_is_back() {
  const size_t bytes = refused_bytes.load();
  if (bytes == 0) return true;
  void* const probe = __real_mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED) return false;
  munmap(probe, bytes);
  refused_bytes = 0;
  return true;
}

}  // namespace

// Hides the environment from OpenBLAS: its variables are meant for the process's other copy of OpenBLAS. Sets
// one thread, so that OpenBLAS starts no threads.
char* __wrap_getenv(const char* name) {
  static char one[] = "1";
  const std::string_view asked = name;
  if (asked == "OPENBLAS_CORETYPE") return core_type;
  return asked == "OPENBLAS_NUM_THREADS" ? one : nullptr;
}

// Maps memory for OpenBLAS; on a refusal, leaves the product, because OpenBLAS repeats a refused mmap()
// endlessly. OpenBLAS does not hold a lock when it maps memory.
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  void* const memory = __real_mmap(address, bytes, protection, flags, file, offset);
  if (memory != MAP_FAILED || way_out == nullptr) return memory;
  refused_bytes = bytes;
  std::longjmp(*way_out, 1);
}

const GradwireBlas* gradwire_blas() {
  static const Library library;
  return &library;
}

bool gradwire_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
                         const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                         int64_t ldc) {
  gradwire_blas();  // chooses the kernels on the first call
  if (!memory_is_back()) return false;
  jmp_buf here;
  if (setjmp(here) != 0) {
    way_out = nullptr;
    return false;
  }
  way_out = &here;
  auto distance = [](int64_t ld) { return static_cast<blasint>(ld > 0 ? ld : 1); };  // BLAS rejects 0
  cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(m), static_cast<blasint>(n), static_cast<blasint>(k), alpha, a,
              distance(lda), b, distance(ldb), beta, c, distance(ldc));
  way_out = nullptr;
  return true;
}
