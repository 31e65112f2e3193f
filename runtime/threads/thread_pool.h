// The process's only pool of host compute threads, shared by all callers.
//
// The pool uses a mutex and a condition variable, because ThreadSanitizer understands these but not OpenMP's
// barriers.
#pragma once

#include <cstdint>
#include <functional>

namespace gradwire {

// Returns the number of threads that compute concurrently: GRADWIRE_THREADS, else the cores of this
// process.
int host_threads();
// Overrides host_threads(), for tests of independence from the thread count. Must be called before the first
// parallel_for.
void set_host_threads(int threads);

// Calls body(begin, end) over disjoint ranges that cover [0, count), each `grain` long except the last, from
// several threads; returns when all are complete. The ranges depend on count and grain alone, never on the
// number of threads, so a reduction per range is deterministic. When all cores are busy with other callers,
// the calling thread runs all ranges. Rethrows the first exception of a body.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace gradwire
