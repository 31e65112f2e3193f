// Divides rows into pieces for host ops. The division depends only on the shape, so that results never depend
// on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/threads/thread_pool.h"

namespace gradwire::host {

// Returns the number of rows in a piece of about 64 KiB of floats: large enough to hide a task's cost, small
// enough for a core's cache.
inline int64_t rows_per_piece(int64_t width) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
}

template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  parallel_for(rows, rows_per_piece(width), body);
}

}  // namespace gradwire::host
