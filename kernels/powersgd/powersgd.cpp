#include "kernels/powersgd/powersgd.h"

#include <algorithm>
#include <string>

#include "kernels/powersgd/large_orthonormalize.h"
#include "runtime/util/error.h"

namespace gradwire {

MatrixTable::MatrixTable(const Stream& stream, std::vector<MatrixDescriptor> matrices)
    : host_(std::move(matrices)) {
  std::vector<MatrixBlocks>& starts = host_blocks_;
  for (MatrixDescriptor& d : host_) {
    int32_t most = std::min({d.rows, d.cols, static_cast<int32_t>(kMaxPowerSgdRank)});
    if (d.rank < 1 || d.rank > most) {
      throw BadInput("PowerSGD: rank {} for a {} x {} matrix; it must be from 1 to {}", d.rank, d.rows,
                     d.cols, most);
    }
    elements_ += int64_t{d.rows} * d.cols;
    p_elements_ += int64_t{d.rows} * d.rank;
    q_elements_ += int64_t{d.cols} * d.rank;
    max_rank_ = std::max(max_rank_, d.rank);
    d.scratch = scratch_doubles_;
    scratch_doubles_ += large_scratch_doubles(d.rank);
    auto pieces = [](int32_t size, int32_t piece) { return (size + piece - 1) / piece; };
    starts.push_back({.row_tile = starts.back().row_tile + pieces(d.rows, kRowTileRows),
                      .panel = starts.back().panel + pieces(d.cols, panel_columns(d.rows)),
                      .tile = starts.back().tile + pieces(d.rows, kTileRows) * pieces(d.cols, kTileCols)});
  }
  device_ = make_buffer<MatrixDescriptor>(stream.device(), count());
  to_device(stream, device_.as<MatrixDescriptor>(), std::span<const MatrixDescriptor>(host_));
  blocks_ = make_buffer<MatrixBlocks>(stream.device(), count() + 1);
  to_device(stream, blocks_.as<MatrixBlocks>(), std::span<const MatrixBlocks>(starts));
}

}  // namespace gradwire
