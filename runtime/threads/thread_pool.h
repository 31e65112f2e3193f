// The process's only pool of host compute threads, shared by all callers.
//
// A plain pool with a mutex and a condition, because ThreadSanitizer understands those and not OpenMP's
// barriers.
#pragma once

#include <cstdint>
#include <functional>

namespace gradwire {

// Returns the number of threads that compute concurrently: GRADWIRE_THREADS, else the cores of this process
// (cpus.h).
int host_threads();
// Overrides host_threads(). Call before the first parallel_for. For tests of independence from the thread
// count.
void set_host_threads(int threads);

// Calls body(begin, end) over disjoint ranges that cover [0, count), each `grain` long except the last, from
// several threads; returns when all are complete. The ranges depend on count and grain alone, never on the
// number of threads, so a reduction per range is deterministic. When all cores are busy with other callers,
// it runs in the caller. Rethrows the first exception of a body.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace gradwire
