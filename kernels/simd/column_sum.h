// Sums over rows on the host, in the two stages of kernels/math/column_chunks.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/math/column_chunks.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {

// Runs the first stage: calls add_rows(begin, end, partial) for each chunk of rows, to add rows [begin, end)
// to the chunk's `width` partial sums in `workspace`, initially 0. Returns the number of chunks.
template <typename AddRows>
int64_t sum_chunks(int64_t rows, int64_t width, float* workspace, const AddRows& add_rows) {
  const auto chunks = column_chunks(rows);
  parallel_for(chunks.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* partial = workspace + i * width;
      std::fill_n(partial, width, 0.0f);
      add_rows(i * chunks.rows, std::min(rows, (i + 1) * chunks.rows), partial);
    }
  });
  return chunks.count;
}

// Runs the second stage: sum(c) = [sum(c) +] partial(0, c) + ... + partial(count - 1, c), with `stride`
// floats between rows of partial sums.
void combine_partial_sums(const float* partial, int64_t count, int64_t stride, int64_t width, bool accumulate,
                          float* sum);
void combine_partial_sums(const PartialSums& of);

}  // namespace gradwire::host
