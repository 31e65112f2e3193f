// The process's one pool of host compute threads, shared by all callers.
//
// It is a plain mutex-and-condition pool, because ThreadSanitizer understands that and not OpenMP's barriers.
#pragma once

#include <cstdint>
#include <functional>

namespace gradwire {

// Number of threads that compute concurrently: GRADWIRE_THREADS, else the cores of this process (cpus.h).
int host_threads();
// Overrides host_threads(). Call before the first parallel_for. For tests that results do not depend on
// the number of threads.
void set_host_threads(int threads);

// Calls body(begin, end) over disjoint ranges that cover [0, count), each `grain` long but the last, from
// several threads, and returns when all are done. The ranges depend on count and grain alone, never on the
// number of threads, so a reduction per range is deterministic. When all cores are busy with other callers it
// runs in the caller. The first exception thrown by a body is rethrown.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace gradwire
