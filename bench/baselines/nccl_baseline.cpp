#include "bench/baselines/nccl_baseline.h"

#include "runtime/util/error.h"

#if defined(GRADWIRE_HAS_NCCL) && defined(GRADWIRE_HAS_CUDA)

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "collectives/agreement/all_gather.h"
#include "collectives/transport/nccl/nccl_api.h"

namespace gradwire::bench {
namespace {

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) {
    throw Error(fmt::format("{}: {}", call, NcclApi::loaded().text(result, nullptr)));
  }
}

}  // namespace

struct NcclBaseline::Impl {
  Communicator& group;
  Stream stream;
  ncclComm_t comm = nullptr;
};

NcclBaseline::NcclBaseline(Communicator& comm, const Stream& stream) : impl_(new Impl{comm, stream}) {
  const NcclApi& nccl = NcclApi::loaded();
  ncclUniqueId id{};
  if (comm.rank() == 0) check(nccl.get_unique_id(&id), "ncclGetUniqueId");
  id = all_gather_value(comm.transport(), stream, id, "the baseline's unique id")[0];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  check(nccl.init_rank(&impl_->comm, comm.world(), id, comm.rank(), &config), "ncclCommInitRankConfig");
}

NcclBaseline::~NcclBaseline() {
  if (impl_->comm != nullptr) NcclApi::loaded().destroy(impl_->comm);
}

double NcclBaseline::time_us(int64_t count, int warmup, int iterations) {
  const NcclApi& nccl = NcclApi::loaded();
  const Stream& stream = impl_->stream;
  Buffer data = make_buffer<float>(stream.device(), count);
  fill_zero(stream, data.data(), data.bytes());
  auto run = [&](int times) {
    for (int i = 0; i < times; ++i) {
      check(nccl.all_reduce(data.data(), data.data(), static_cast<size_t>(count), ncclFloat32, ncclSum,
                            impl_->comm, reinterpret_cast<cudaStream_t>(stream.native())),
            "ncclAllReduce");
    }
    stream.synchronize();
  };
  run(warmup);
  impl_->group.barrier();
  const auto start = std::chrono::steady_clock::now();
  run(iterations);
  const double mine =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
      iterations;
  const auto all = all_gather_value(impl_->group.transport(), stream, mine, "the baseline's times");
  return *std::max_element(all.begin(), all.end());
}

bool NcclBaseline::available() {
  return NcclApi::loaded().all_reduce != nullptr;
}

}  // namespace gradwire::bench

#else

namespace gradwire::bench {

struct NcclBaseline::Impl {};
NcclBaseline::NcclBaseline(Communicator&, const Stream&) {
  throw Error("this build has no NCCL transport; use --no-baseline");
}
NcclBaseline::~NcclBaseline() = default;
double NcclBaseline::time_us(int64_t, int, int) {
  return 0;
}
bool NcclBaseline::available() {
  return false;
}

}  // namespace gradwire::bench

#endif
