// The allreduce over peer access on the host: runs the kernel's steps in sequence, by a format's ops.
#include "kernels/wire/fused.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/wire/formats.h"
#include "kernels/wire/fp32.h"
#include "runtime/threads/running_clock.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

int64_t aligned(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

}  // namespace

FusedAllreduce stream_barrier(const PeerMemory& peers) {
  FusedAllreduce call;
  call.peers = peers;
  call.one_shot = true;
  call.out = reinterpret_cast<float*>(peers.windows[peers.rank]);  // count is 0
  call.in = call.out;
  return call;
}

int64_t lay_out(FusedAllreduce& call, Wire wire) {
  const int world = call.peers.world;
  int64_t used = 0, largest = 0;
  for (int r = 0; r < world; ++r) {
    const int64_t count = call.begin[r + 1] - call.begin[r];
    largest = std::max(largest, count);
    call.offset[r] = used;
    used += aligned(wire->bytes(count));
  }
  if (call.one_shot && !wire->exact) {
    call.exported = used;
    call.scratch = used + aligned(4 * largest);
    used += call.scratch;  // scratch holds encodings in the same layout
  }
  return used;
}

PeerKernelLimits peer_kernel_limits(Wire wire) {
  constexpr double kThreads = 256, kTile = 2048;
  // Values per microsecond. The GPU's local memory delivers the rank's values and residuals in 0.8 us; as
  // many values are in flight as for peer reads.
  constexpr double kFp32Values = 280e3, kBf16Values = 200e3;
  // Values per microsecond for 32 of an H200's 132 multiprocessors. Block formats, with 130 (int8) to 530
  // (mxfp4) instructions per value, also have a third of the warps.
  constexpr double kFp8Values = 50e3, kBlockValues = 10e3;
  if (wire->exact) return {kMostPeerBlocks * kThreads * kFp32ReadsAhead * 16, kFp32Values};
  if (wire == kBf16) return {kMostPeerBlocks * kThreads * kBf16ReadsAhead * 16, kBf16Values};
  if (wire == kFp8) return {kMostPeerBlocks * kThreads * kFp8ReadsAhead * 4, kFp8Values};
  const auto tile = static_cast<double>(wire->bytes(static_cast<int64_t>(kTile)));
  const int tiles = wire->granularity <= 512 ? kBlockReadsAhead : 1;  // topk does not read ahead
  return {kMostPeerBlocks * tile * tiles, kBlockValues};
}

#ifndef GRADWIRE_SIMT_TESTS
namespace host {
namespace {

using Clock = RunningClock;

class Call {
 public:
  Call(const WireFormat& format, const FusedAllreduce& call) : format_(format), a_(call), peers_(call.peers) {
    std::byte* const mine = peers_.windows[peers_.rank];
    calls_ = *word(mine, kPeerCallsOffset);
    half_ = kPeerHeaderBytes + (calls_ % 2) * peers_.half_bytes;
  }

  void run() {
    for (int k = 1; k < peers_.world; ++k) encode(to(k));
    if (a_.one_shot) format_.exact ? encode(peers_.rank) : export_own();
    barrier(0);
    if (a_.one_shot) {
      for (int k = 0; k < peers_.world; ++k) hop(to(k));
    } else {
      hop(peers_.rank);
      barrier(1);
      for (int k = 1; k < peers_.world; ++k) decode(to(k));
    }
    now_.synchronize();  // rethrows
    *word(peers_.windows[peers_.rank], kPeerCallsOffset) = calls_ + 1;
  }

 private:
  static uint32_t* word(std::byte* window, int64_t offset) {
    return reinterpret_cast<uint32_t*>(window + offset);
  }
  int to(int k) const { return (peers_.rank + k) % peers_.world; }
  std::byte* wire(int rank, int chunk) const { return peers_.windows[rank] + half_ + a_.offset[chunk]; }
  int64_t count(int chunk) const { return a_.begin[chunk + 1] - a_.begin[chunk]; }
  float* exported(int rank) const {
    return reinterpret_cast<float*>(peers_.windows[rank] + half_ + a_.exported);
  }
  template <typename T>
  T* at(T* data, int chunk) const {
    return data == nullptr ? nullptr : data + a_.begin[chunk];
  }
  // Returns the encode's arguments for chunk c, without inputs and results.
  ReduceEncode own(int c) const {
    ReduceEncode args;
    args.own = at(a_.in, c);
    args.residual = at(a_.residual, c);
    args.out_scale = a_.scale;
    args.count = count(c);
    args.rounding = a_.rounding;
    args.rounding.first_element += a_.begin[c];
    return args;
  }

  void encode(int c) const {
    std::byte* const place = wire(peers_.rank, c);
    if (format_.exact) {
      std::memcpy(place, at(a_.in, c), static_cast<size_t>(count(c)) * sizeof(float));
      return;
    }
    ReduceEncode args = own(c);
    args.wire = place;
    format_.reduce_encode(now_, args);
  }

  void export_own() const {
    const ReduceEncode args = own(peers_.rank);
    float* const to = exported(peers_.rank);
    for (int64_t i = 0; i < args.count; ++i)
      to[i] = args.residual == nullptr ? args.own[i] : args.own[i] + args.residual[i];
  }

  void hop(int c) const {
    const bool mine = c == peers_.rank;
    if (format_.exact) {
      Reduce args{.own = at(a_.in, c),
                  .out = at(a_.out, c),
                  .own_scale = a_.part_scale,
                  .scale = a_.scale,
                  .count = count(c)};
      add_inputs(args, c, peers_.rank);
      fp32_reduce(now_, args);
      if (!a_.one_shot)
        std::memcpy(wire(peers_.rank, c), args.out, static_cast<size_t>(args.count) * sizeof(float));
      return;
    }
    ReduceEncode args = own(c);
    add_inputs(args, c, c);
    args.own_scale = a_.part_scale;
    args.out = at(a_.out, c);
    args.wire =
        a_.one_shot ? peers_.windows[peers_.rank] + half_ + a_.scratch + a_.offset[c] : wire(peers_.rank, c);
    if (!mine) {
      args.own = exported(c);
      args.residual = nullptr;
      args.rounding.seed = a_.seeds[c];
    }
    format_.reduce_encode(now_, args);
    if (!mine && a_.residual != nullptr) {  // resets the residual as Decode does
      for (int64_t i = 0; i < args.count; ++i) {
        if (!is_finite(args.out[i])) at(a_.residual, c)[i] = 0.0f;
      }
    }
  }
  // Adds the parts of all ranks except `without`, whose part is `own`.
  template <typename Args>
  void add_inputs(Args& args, int c, int without) const {
    for (int r = 0; r < peers_.world; ++r) {
      if (r == without) continue;
      args.input_scales.of[args.num_inputs] = a_.part_scale;
      args.inputs[args.num_inputs++] =
          static_cast<std::remove_reference_t<decltype(args.inputs[0])>>(static_cast<void*>(wire(r, c)));
    }
    args.own_position = without;
  }
  void decode(int c) const {
    if (format_.exact) {
      std::memcpy(at(a_.out, c), wire(c, c), static_cast<size_t>(count(c)) * sizeof(float));
      return;
    }
    format_.decode(now_, {.wire = wire(c, c),
                          .out = at(a_.out, c),
                          .scale = a_.scale,
                          .count = count(c),
                          .residual = at(a_.residual, c)});
  }

  void barrier(uint32_t which) const {
    const uint32_t target = 2 * calls_ + 1 + which;
    for (int peer = 0; peer < peers_.world; ++peer) {
      if (peer == peers_.rank) continue;
      std::atomic_ref(*word(peers_.windows[peer], 4 * peers_.rank)).store(target, std::memory_order_release);
    }
    const auto deadline = Clock::now() + std::chrono::nanoseconds(peers_.patience_ns);
    for (int peer = 0; peer < peers_.world; ++peer) {
      if (peer != peers_.rank) wait_for(peer, target, which, deadline);
    }
  }
  void wait_for(int peer, uint32_t target, uint32_t which, Clock::time_point deadline) const {
    const std::atomic_ref signal(*word(peers_.windows[peers_.rank], 4 * peer));
    for (int looks = 1; static_cast<int32_t>(signal.load(std::memory_order_acquire) - target) < 0; ++looks) {
      // Yields the core to ranks that share it; after 1000 looks, sleeps.
      looks < 1000 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (looks % 16 != 0) continue;
      const bool stopped = std::atomic_ref(peers_.report->stop).load(std::memory_order_acquire) != 0;
      if (!stopped && Clock::now() < deadline) continue;
      if (!stopped) {
        peers_.report->barrier = which;
        std::atomic_ref(peers_.report->missing)
            .store(static_cast<uint32_t>(peer) + 1, std::memory_order_release);
      }
      throw CommError(
          fmt::format("rank {}: {} at barrier {} of an allreduce over peer memory, waiting for rank {}",
                      peers_.rank, stopped ? "stopped" : "no progress until the deadline", which + 1, peer));
    }
  }

  const WireFormat& format_;
  const FusedAllreduce& a_;
  const PeerMemory& peers_;
  const Stream now_ = Stream::immediate_host();
  uint32_t calls_ = 0;
  int64_t half_ = 0;
};

}  // namespace

void fused_allreduce(const WireFormat& format, const FusedAllreduce& call) {
  Call(format, call).run();
}

}  // namespace host
#endif

void WireFormat::fused_allreduce(const Stream& stream, const FusedAllreduce& call) const {
#ifndef GRADWIRE_SIMT_TESTS
  if (stream.device().is_host()) return stream.submit([this, call] { host::fused_allreduce(*this, call); });
#endif
  (void)stream, (void)call;
  throw BadInput(fmt::format("wire format '{}' has no kernel for an allreduce over peer memory", name));
}

}  // namespace gradwire
