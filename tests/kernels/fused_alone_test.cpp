// The kernel of an allreduce over peer memory, run by a single rank. The other ranks' signals and data are in
// the windows before the kernel starts. The kernel cannot hang, so this test is the first test of the kernel
// on a GPU. compute-sanitizer, which runs one kernel at a time, can check the kernel.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/wire/formats.h"
#include "kernels/wire/fused.h"
#include "tests/kernels/compare.h"
#include "tests/support/devices.h"
#include "tests/support/normal.h"

namespace gradwire::testing {
namespace {

constexpr int kWorld = 3, kBlocks = 2;

// An allreduce of kWorld ranks that has run on the host. Its windows contain all data that rank 0 reads from
// other ranks.
class Finished {
 public:
  Finished(Wire wire, bool one_shot, Rounding rounding)
      : wire_(wire), one_shot_(one_shot), rounding_(rounding) {
    const int64_t grain = wire->granularity;
    // One chunk has more tiles per thread block (of kBlocks) than are prefetched. The other chunks have few
    // tiles.
    const int64_t most = grain > 512 ? 5 * grain : (20 * 2048 + grain - 1) / grain * grain;
    for (int64_t b : {int64_t{0}, most, most + 3 * grain, most + 4 * grain + 5}) begin_.push_back(b);
    for (int r = 0; r < kWorld; ++r) {
      inputs.push_back(normal(begin_.back(), static_cast<uint64_t>(10 + r)));
      residuals.push_back(normal(begin_.back(), static_cast<uint64_t>(20 + r)));
    }
    FusedAllreduce layout = call(0);
    half_bytes = (lay_out(layout, wire) + 255) / 256 * 256;
    windows.assign(kWorld, std::vector<std::byte>(static_cast<size_t>(peer_window_bytes(half_bytes))));
    results = inputs;
    kept = residuals;
    PeerReport report;
    std::vector<std::thread> threads;
    for (int r = 0; r < kWorld; ++r) {
      threads.emplace_back([&, r] {
        FusedAllreduce a = call(r);
        for (int p = 0; p < kWorld; ++p) a.peers.windows[p] = windows[p].data();
        a.peers.report = &report;
        a.in = a.out = results[r].data();
        a.residual = kept[r].data();
        a.rounding.step = &step;
        host::fused_allreduce(*wire_, a);
      });
    }
    for (std::thread& t : threads) t.join();
  }

  // Returns a rank's arguments of the call without addresses.
  FusedAllreduce call(int rank) const {
    FusedAllreduce a;
    a.peers.rank = rank;
    a.peers.world = kWorld;
    a.peers.blocks = kBlocks;
    a.peers.half_bytes = half_bytes;
    a.peers.patience_ns = 20'000'000'000;
    a.one_shot = one_shot_;
    a.part_scale = part_scale_for(1.0f / kWorld);
    a.scale = 1.0f / kWorld / a.part_scale;
    a.rounding = {rounding_, seed(rank), nullptr, 40};
    for (int r = 0; r < kWorld; ++r) a.seeds[r] = seed(r);
    std::copy(begin_.begin(), begin_.end(), a.begin);
    lay_out(a, wire_);
    return a;
  }

  int64_t count() const { return begin_.back(); }

  std::vector<std::vector<float>> inputs, residuals;  // [rank]: values before the call
  std::vector<std::vector<float>> results, kept;      // values after the call
  std::vector<std::vector<std::byte>> windows;
  int64_t half_bytes = 0;
  uint64_t step = 3;

 private:
  static uint64_t seed(int rank) { return static_cast<uint64_t>(rank) * 77 + 5; }
  const Wire wire_;
  const bool one_shot_;
  const Rounding rounding_;
  std::vector<int64_t> begin_;
};

Buffer on_device(const Stream& stream, Device device, const void* data, size_t bytes) {
  Buffer buffer(device, bytes);
  copy(stream, buffer.data(), data, bytes);
  stream.synchronize();
  return buffer;
}

using Parameters = std::tuple<Device, Wire>;
class FusedAlone : public ::testing::TestWithParam<Parameters> {};

TEST_P(FusedAlone, OneRanksKernelMatchesTheHostBitForBit) {
  const auto [device, wire] = GetParam();
  for (bool one_shot : {false, true}) {
    const Rounding rounding = wire->stochastic && one_shot ? Rounding::stochastic : Rounding::nearest;
    const Finished run(wire, one_shot, rounding);
    SCOPED_TRACE(one_shot ? "one-shot" : "two-shot");
    // This rank's window before the call contains only the other ranks' signals, which have passed both
    // barriers.
    std::vector<std::byte> own(run.windows[0].size());
    for (int block = 0; block < kMostPeerBlocks; ++block) {
      for (int from = 1; from < kWorld; ++from) {
        const uint32_t passed = 2;
        std::memcpy(own.data() + 4 * (block * kMostPeers + from), &passed, sizeof passed);
      }
    }
    const Stream stream = Stream::create(device, "test");
    const auto bytes = static_cast<size_t>(run.count()) * sizeof(float);
    FusedAllreduce a = run.call(0);
    std::vector<Buffer> windows;
    for (int r = 0; r < kWorld; ++r) {
      const auto& window = r == 0 ? own : run.windows[r];
      windows.push_back(on_device(stream, device, window.data(), window.size()));
      a.peers.windows[r] = windows.back().as<std::byte>();
    }
    const Buffer data = on_device(stream, device, run.inputs[0].data(), bytes);
    const Buffer residual = on_device(stream, device, run.residuals[0].data(), bytes);
    const Buffer step = on_device(stream, device, &run.step, sizeof run.step);
    const Buffer report = Buffer::pinned(device, sizeof(PeerReport));
    new (report.data()) PeerReport();
    a.peers.report = report.as<PeerReport>();
    a.in = a.out = data.as<float>();
    a.residual = residual.as<float>();
    a.rounding.step = step.as<const uint64_t>();
    wire->fused_allreduce(stream, a);
    std::vector<float> result(run.count()), kept(result.size());
    copy(stream, result.data(), data.data(), bytes);
    copy(stream, kept.data(), residual.data(), bytes);
    stream.synchronize();
    EXPECT_EQ(report.as<PeerReport>()->missing, 0u);
    expect_same_bits(result, run.results[0], "result");
    if (!wire->exact) expect_same_bits(kept, run.kept[0], "residual");
  }
}

std::vector<Wire> formats_with_kernels() {
  std::vector<Wire> all = example_wire_formats();
  std::erase_if(all, [](Wire wire) { return wire->registered; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(On, FusedAlone,
                         ::testing::Combine(::testing::ValuesIn(available_devices()),
                                            ::testing::ValuesIn(formats_with_kernels())),
                         [](const ::testing::TestParamInfo<Parameters>& info) {
                           std::string name =
                               device_label(std::get<0>(info.param)) + "_" + std::get<1>(info.param)->spec();
                           std::ranges::replace_if(
                               name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace gradwire::testing
