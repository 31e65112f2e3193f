#include "bench/baselines/allreduce_baseline.h"

#if defined(GRADWIRE_HAS_NCCL) && defined(GRADWIRE_HAS_CUDA)

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/transport/nccl/nccl_api.h"
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) {
    throw Error(fmt::format("{}: {}", call, NcclApi::loaded().text(result, nullptr)));
  }
}

class NcclBaseline final : public AllreduceBaseline {
 public:
  NcclBaseline(Communicator& group, const Stream& stream) : group_(group), stream_(stream) {
    ncclUniqueId id{};
    if (group.rank() == 0) check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    id = all_gather_value(group.transport(), stream, id, "the baseline's unique id")[0];
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    check(nccl_.init_rank(&comm_, group.world(), id, group.rank(), &config), "ncclCommInitRankConfig");
  }
  ~NcclBaseline() override {
    if (comm_ != nullptr) nccl_.destroy(comm_);
  }

  double time_us(int64_t count, int warmup, int iterations) override {
    Buffer data = make_buffer<float>(stream_.device(), count);
    fill_zero(stream_, data.data(), data.bytes());
    auto run = [&](int times) {
      for (int i = 0; i < times; ++i) {
        check(nccl_.all_reduce(data.data(), data.data(), static_cast<size_t>(count), ncclFloat32, ncclSum,
                               comm_, reinterpret_cast<cudaStream_t>(stream_.native())),
              "ncclAllReduce");
      }
      stream_.synchronize();
    };
    run(warmup);
    group_.barrier();
    const auto start = std::chrono::steady_clock::now();
    run(iterations);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
           iterations;
  }

 private:
  const NcclApi& nccl_ = NcclApi::loaded();
  Communicator& group_;
  const Stream stream_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<AllreduceBaseline> make_nccl_baseline(Communicator& comm, const Stream& stream) {
  if (NcclApi::loaded().all_reduce == nullptr) return nullptr;
  return std::make_unique<NcclBaseline>(comm, stream);
}

}  // namespace gradwire::bench

#else

namespace gradwire::bench {

std::unique_ptr<AllreduceBaseline> make_nccl_baseline(Communicator&, const Stream&) {
  return nullptr;
}

}  // namespace gradwire::bench

#endif
