// Tests peer memory over NCCL on a simulated GPU, with one rank. Functions of this file replace NCCL's.
#include <cuda_runtime_api.h>

#include "tests/collectives/fake_nccl.h"

#if NCCL_VERSION_CODE == NCCL_VERSION(2, 28, 9)
#include <nccl_device/impl/comm__types.h>
#include <nccl_device/impl/core__types.h>

namespace gradwire::testing {
namespace {

ncclWindow_vidmem window;               // the window's description
ncclWindow_vidmem* returned = &window;  // what registering returns: the description or its copy on the GPU

NcclApi nccl_with_a_window() {
  NcclApi api = fake_nccl();
  api.mem_alloc = [](void** data, size_t bytes) {
    return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  };
  api.mem_free = [](void* data) {
    return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  };
  api.window_register = [](ncclComm_t, void* data, size_t, ncclWindow_vidmem** registered, int) {
    window = {};
    window.lsaFlatBase = static_cast<char*>(data);
    window.stride4G = 1;
    if (returned != &window) {
      EXPECT_EQ(cudaMemcpyAsync(returned, &window, sizeof window, cudaMemcpyDefault, nullptr), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    }
    return *registered = returned, ncclSuccess;
  };
  api.window_deregister = [](ncclComm_t, ncclWindow_vidmem*) { return ncclSuccess; };
  api.team_lsa = [](ncclComm_t) { return NcclApi::Team{1, 0, 1}; };
  return api;
}

// NCCL without symmetric memory describes a window on the host. A GPU cannot use such a window.
TEST(StandinNccl, MapsAWindowOnlyIfItIsDeviceMemory) {
  if (cuda_device_count() < 1) GTEST_SKIP() << "GRADWIRE_STANDIN_GPUS=0";
  const NcclApi api = nccl_with_a_window();
  const Buffer on_gpu(Device::cuda(0), sizeof window);
  for (const bool on_host : {true, false}) {
    SCOPED_TRACE(on_host ? "a description on the host" : "a description on the GPU");
    returned = on_host ? &window : on_gpu.as<ncclWindow_vidmem>();
    FakeWorld world(1);
    NcclSetup setup = fake_setup(world[0], std::chrono::seconds(20), api);
    setup.device = Device::cuda(0);
    NcclTransport transport(std::move(setup));
    ASSERT_EQ(transport.peer_access_obstacle(), "");
    const std::shared_ptr<MappedPeers> peers = transport.peer_access()->open(4096, false);
    EXPECT_EQ(peers == nullptr, on_host);
    if (peers == nullptr) continue;
    EXPECT_EQ(peers->memory.windows[0], reinterpret_cast<std::byte*>(window.lsaFlatBase));
  }
  returned = &window;
}

}  // namespace
}  // namespace gradwire::testing

#endif
