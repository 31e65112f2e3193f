#include "kernels/powersgd.h"

#include <algorithm>
#include <string>

namespace gradwire {

GW_DEFINE_OP(powersgd_project, PowerSgdProject)
GW_DEFINE_OP(powersgd_back_project, PowerSgdBackProject)
GW_DEFINE_OP(powersgd_reconstruct, PowerSgdReconstruct)

size_t powersgd_workspace_bytes(Device, const MatrixTable&) { return 0; }

MatrixTable::MatrixTable(const Stream& stream, std::vector<MatrixDescriptor> matrices)
    : host_(std::move(matrices)) {
  for (const auto& d : host_) {
    int32_t most = std::min({d.rows, d.cols, static_cast<int32_t>(kMaxPowerSgdRank)});
    if (d.rank < 1 || d.rank > most) {
      throw BadInput("PowerSGD: rank " + std::to_string(d.rank) + " for a " + std::to_string(d.rows) + " x " +
                     std::to_string(d.cols) + " matrix; it must be from 1 to " + std::to_string(most));
    }
    elements_ += int64_t{d.rows} * d.cols;
    p_elements_ += int64_t{d.rows} * d.rank;
    q_elements_ += int64_t{d.cols} * d.rank;
  }
  device_ = make_buffer<MatrixDescriptor>(stream.device(), count());
  to_device(stream, device_.as<MatrixDescriptor>(), std::span<const MatrixDescriptor>(host_));
}

}  // namespace gradwire
