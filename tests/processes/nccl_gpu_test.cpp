// Tests of NCCL with several ranks on one GPU. NVIDIA does not support that use: each rank claims to be a
// different host, so that NCCL uses sockets on the loopback interface, and every test has a hard time limit
// (tests/processes). The tests are skipped without a GPU. tests/collectives/nccl_test.cpp covers all
// behaviour that needs no GPU.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/transport/nccl/nccl.h"
#include "runtime/util/error.h"
#include "tests/collectives/group.h"
#include "tests/processes/processes.h"
#include "tests/support/expect.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

class NcclGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
    const std::string reason = nccl_unavailable_reason();
    ASSERT_EQ(reason, "") << "there is a GPU, but no NCCL";
  }
};

std::unique_ptr<Communicator> join(const Me& me, bool shrinkable = false) {
  const std::string host = fmt::format("{}-{}", getppid(), me.rank);
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, const char*>>{{"NCCL_HOSTID", host.c_str()},
                                                                  {"NCCL_NET", "Socket"},
                                                                  {"NCCL_NET_PLUGIN", "none"},
                                                                  {"NCCL_SOCKET_IFNAME", "=lo"},
                                                                  {"NCCL_IB_DISABLE", "1"},
                                                                  {"NCCL_P2P_DISABLE", "1"},
                                                                  {"NCCL_SHM_DISABLE", "1"},
                                                                  {"NCCL_NVLS_ENABLE", "0"},
                                                                  {"NCCL_MNNVL_ENABLE", "0"},
                                                                  {"NCCL_RAS_ENABLE", "0"},
                                                                  {"NCCL_MAX_CTAS", "2"},
                                                                  {"NCCL_CGA_CLUSTER_SIZE", "0"},
                                                                  {"NCCL_PROTO", "Simple"},
                                                                  {"NCCL_P2P_NET_CHUNKSIZE", "524288"}}) {
    setenv(name, value, 1);
  }
  unsetenv("CUDA_LAUNCH_BLOCKING");
  return std::make_unique<Communicator>(make_nccl_transport(
      {.group = {me.rendezvous, me.rank, me.world, me.timeout}, .device = 0, .shrinkable = shrinkable}));
}

constexpr int64_t kCount = 4099;

// Returns integers, so that every wire format and every order of additions gives the same bits.
std::vector<float> whole_numbers(int rank) {
  std::vector<float> v(kCount);
  for (int64_t i = 0; i < kCount; ++i) v[i] = static_cast<float>((i * 7 + rank * 3) % 17 - 8);
  return v;
}

std::vector<float> sum_of(int world) {
  std::vector<float> sum(kCount, 0.0f);
  for (int r = 0; r < world; ++r) {
    const auto part = whole_numbers(r);
    for (int64_t i = 0; i < kCount; ++i) sum[i] += part[i];
  }
  return sum;
}

void check(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

struct OnGpu {
  explicit OnGpu(Communicator& comm, const Schedule& schedule, Wire wire)
      : stream(Stream::create(comm.device(), "test")),
        data(make_buffer<float>(comm.device(), kCount)),
        residual(make_buffer<float>(comm.device(), kCount)),
        program(comm.transport(), schedule, {data.data(), data.data(), residual.as<float>(), kCount},
                {.what = "test", .wire = wire}),
        workspace(comm.device(), program.workspace_bytes()) {
    fill_zero(stream, residual.data(), residual.bytes());
    program.bind(workspace.data());
    fill(comm.rank());
  }
  void fill(int rank) {
    const auto values = whole_numbers(rank);
    to_device(stream, data.as<float>(), std::span<const float>(values));
  }
  std::vector<float> result() { return to_host(stream, data.as<const float>(), kCount); }
  Stream stream;
  Buffer data, residual;
  Program program;
  Buffer workspace;
};

RANK_PROGRAM(NcclAllreduce) {
  auto comm = join(me);
  for (const Schedule& schedule : allreduces(me.world)) {
    for (Wire wire : {kFp32, kBf16}) {
      OnGpu gpu(*comm, schedule, wire);
      gpu.program.run(gpu.stream);
      const auto got = gpu.result();
      comm->check();
      check(got == sum_of(me.world), std::string("wrong sum: ") + name(schedule.kind) + " " + wire->name);
    }
  }
  comm->barrier();
}

TEST_F(NcclGpu, EveryScheduleAndWireHasTheExactSum) {
  for (int world : {2, 3, 4}) all_succeeded(run_processes("NcclAllreduce", world, {.limit = 90s}));
}

RANK_PROGRAM(NcclCaptured) {
  auto comm = join(me);
  OnGpu gpu(*comm, two_shot(me.world), kBf16);
  gpu.program.run(gpu.stream);  // establishes NCCL's connections
  gpu.stream.synchronize();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(gpu.stream.native(), cudaStreamCaptureModeThreadLocal) == cudaSuccess,
        "begin");
  gpu.program.run(gpu.stream);
  check(cudaStreamEndCapture(gpu.stream.native(), &graph) == cudaSuccess, "end");
  check(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess, "instantiate");
  for (int launch = 0; launch < 3; ++launch) {
    gpu.fill(me.rank);
    check(cudaGraphLaunch(executable, gpu.stream.native()) == cudaSuccess, "launch");
    const auto got = gpu.result();
    comm->check();
    check(got == sum_of(me.world), fmt::format("wrong sum in launch {}", launch));
  }
  comm->barrier();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_F(NcclGpu, CapturesAnAllreduceInAGraph) {
  all_succeeded(run_processes("NcclCaptured", 2, {.limit = 60s}));
}

// Kills one rank in step 3. With the option "shrink", the survivors regroup and continue; otherwise each
// survivor gets an error.
RANK_PROGRAM(NcclLosesARank) {
  const bool shrinks = me.option("then") == "shrink";
  auto comm = join(me, shrinks);
  try {
    OnGpu gpu(*comm, ring(me.world), kFp32);
    for (int step = 0; step < 100; ++step) {
      if (step == 3 && me.rank == 1) raise(SIGKILL);
      gpu.program.run(gpu.stream);
      gpu.stream.synchronize();
      comm->check();
    }
  } catch (const CommError&) {
    if (!shrinks) throw;
    std::vector<int> survivors;
    auto fewer = comm->regroup(20s, survivors);
    OnGpu gpu(*fewer, ring(me.world - 1), kFp32);
    gpu.program.run(gpu.stream);
    const auto got = gpu.result();
    fewer->check();
    check(got == sum_of(me.world - 1), "wrong sum after the shrink");
  }
}

TEST_F(NcclGpu, NamesAKilledRank) {
  auto ranks =
      run_processes("NcclLosesARank", 3, {.timeout = 20s, .limit = 60s, .options = {{"then", "end"}}});
  for (int r : {0, 2}) {
    EXPECT_TRUE(ranks[r].ended_by_itself) << ranks[r].output;
    EXPECT_EQ(ranks[r].exit_code, 3) << ranks[r].output;
    expect_has(ranks[r].output, {"rank 1"});
  }
}

TEST_F(NcclGpu, SurvivorsShrinkAndContinue) {
  auto ranks =
      run_processes("NcclLosesARank", 3, {.timeout = 20s, .limit = 60s, .options = {{"then", "shrink"}}});
  if (const size_t at = ranks[0].output.find("a communicator that survives failures needs NCCL");
      at != std::string::npos)
    GTEST_SKIP() << ranks[0].output.substr(at);
  for (int r : {0, 2}) EXPECT_EQ(ranks[r].exit_code, 0) << ranks[r].output;
}

}  // namespace
}  // namespace gradwire::testing
