#include "trainer/train/snapshots.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

int64_t moment_elements(const RankState& rank) {
  int64_t elements = 0;
  for (const ElementRange& part : rank.parts) elements += part.count();
  return elements;
}

}  // namespace

void Snapshots::copy_state(Slot& slot, const RankState& rank) {
  const Stream& stream = rank.stream;
  slot.weights.resize(static_cast<size_t>(rank.layout.elements));
  copy(stream, slot.weights.data(), rank.weights.data, slot.weights.size() * sizeof(float));
  slot.moments.resize(rank.moments.size());
  for (size_t i = 0; i < rank.moments.size(); ++i) {
    slot.moments[i].resize(static_cast<size_t>(moment_elements(rank)));
    copy(stream, slot.moments[i].data(), rank.moments[i].values.data, slot.moments[i].size() * sizeof(float));
  }
  slot.codecs.take(stream, rank.reducer, rank.comm.world());
}

void Snapshots::take(const RankState& rank, const std::vector<int>& ranks, const Position& position,
                     Pending pending) {
  Slot& slot = slot_of(position.step);
  const Stream& stream = rank.stream;
  stream.submit([&slot] { slot.step = -1; });
  if (states_) copy_state(slot, rank);
  const int64_t step = position.step;
  slot.label = {mix(0x6e6f726d, static_cast<uint64_t>(step)),
                fmt::format("the norms of the residuals after {} steps", step)};
  const int me = rank.comm.rank(), world = rank.comm.world();
  slot.statuses.resize(static_cast<size_t>(world));
  auto* const statuses = slot.statuses.data();
  Transport& transport = rank.comm.transport();
  stream.submit([&slot, &status = statuses[me], &transport] {
    status = {slot.codecs.residual_norm(), static_cast<double>(transport.waiting_joiners())};
  });
  slot.transfers.clear();
  for (int peer = 0; peer < world; ++peer) {
    if (peer == me) continue;
    slot.transfers.push_back({Transfer::Kind::send, peer, statuses + me, sizeof statuses[0]});
    slot.transfers.push_back({Transfer::Kind::receive, peer, statuses + peer, sizeof statuses[0]});
  }
  slot.call = {slot.label.tag, slot.label.what};
  transport.begin_call(stream, slot.call);
  transport.exchange(stream, slot.transfers, slot.label);
  stream.submit([&slot, ranks, position, pending] {
    slot.description = {position, pending, ranks, {}, false};
    for (const auto& [norm, joiners] : slot.statuses) {
      slot.description.residual_norms.push_back(norm);
      slot.description.joiners = slot.description.joiners || joiners > 0;
    }
    slot.step = position.step;
  });
}

void Snapshots::describe(const Description& description) {
  find(description.position.step);
  slot_of(description.position.step).description = description;
}

void Snapshots::take_first(const RankState& rank, const Description& description) {
  Slot& slot = slot_of(description.position.step);
  copy_state(slot, rank);
  rank.stream.synchronize();
  slot.description = description;
  slot.step = description.position.step;
}

std::optional<int64_t> Snapshots::newest() const {
  const int64_t step = std::max(slots_[0].step.load(), slots_[1].step.load());
  return step < 0 ? std::nullopt : std::optional(step);
}

const Snapshots::Slot& Snapshots::find(int64_t step) const {
  for (const Slot& slot : slots_) {
    if (step >= 0 && slot.step == step) return slot;
  }
  throw Error("cannot return to step {}: this rank has snapshots after steps {} and {}", step,
              slots_[0].step.load(), slots_[1].step.load());
}

void Snapshots::drop_after(int64_t step) {
  for (Slot& slot : slots_) {
    if (slot.step > step) slot.step = -1;
  }
}

bool Snapshots::restore(const RankState& rank, int64_t step) const {
  const Slot& slot = find(step);
  const Stream& stream = rank.stream;
  if (static_cast<int64_t>(slot.weights.size()) != rank.layout.elements ||
      slot.moments.size() != rank.moments.size()) {
    throw Error("Snapshots::restore: another model or optimizer");
  }
  copy(stream, rank.weights.data, slot.weights.data(), slot.weights.size() * sizeof(float));
  for (size_t i = 0; i < slot.moments.size(); ++i) {
    copy(stream, rank.moments[i].values.data, slot.moments[i].data(), slot.moments[i].size() * sizeof(float));
  }
  // A description also has ranks that were lost or have joined. A replaced rank leaves the world's size.
  const int world = rank.comm.world();
  const bool same_ranks = static_cast<int>(slot.description.ranks.size()) == world;
  const bool left_over = slot.codecs.restore(stream, rank.reducer, same_ranks ? world : 0);
  rank.reducer.resume_at(step);
  return left_over;
}

int64_t Snapshots::bytes(int64_t elements, int64_t moments, int64_t codec_bytes) {
  return static_cast<int64_t>(kSlots) *
         (elements * (1 + moments) * static_cast<int64_t>(sizeof(float)) + codec_bytes);
}

namespace {

// Bytes per exchange. Each exchange has a separate deadline.
constexpr size_t kPieceBytes = size_t{32} << 20;

// Transfers `bytes`, of the same size on all ranks, from the ranks that are not `joiners` to the joiners, in
// pieces. `pieces`: counts them.
void transfer(Transport& transport, const std::vector<int>& joiners, std::span<std::byte> bytes,
              uint64_t& pieces) {
  const auto is_new = [&](int rank) { return std::ranges::find(joiners, rank) != joiners.end(); };
  std::vector<int> senders;
  for (int r = 0; r < transport.world(); ++r) {
    if (!is_new(r)) senders.push_back(r);
  }
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPieceBytes, bytes.size()))) {
    const std::span<std::byte> piece = bytes.first(std::min(kPieceBytes, bytes.size()));
    std::vector<Transfer> transfers;
    for (size_t s = 0; s < senders.size(); ++s) {
      const size_t begin = piece.size() * s / senders.size(), end = piece.size() * (s + 1) / senders.size();
      if (begin == end) continue;
      if (is_new(transport.rank())) {
        transfers.push_back({Transfer::Kind::receive, senders[s], piece.data() + begin, end - begin});
      } else if (senders[s] == transport.rank()) {
        for (const int to : joiners)
          transfers.push_back({Transfer::Kind::send, to, piece.data() + begin, end - begin});
      }
    }
    const ExchangeLabel label{mix(0x68616e64, pieces++), "the state of a rank that joins"};
    const Call call{mix(label.tag, piece.size()), label.what};
    const Stream now = Stream::immediate_host();
    transport.begin_call(now, call);
    transport.exchange(now, transfers, label);
  }
}

std::span<std::byte> bytes_of(float* values, int64_t count) {
  return std::as_writable_bytes(std::span<float>(values, static_cast<size_t>(count)));
}

}  // namespace

void transfer_state(const RankState& rank, const std::vector<int>& joiners) {
  const bool joins = std::ranges::find(joiners, rank.comm.rank()) != joiners.end();
  uint64_t pieces = 0;
  const auto send = [&](std::span<std::byte> bytes) {
    transfer(rank.comm.transport(), joiners, bytes, pieces);
  };
  send(bytes_of(rank.weights.data, rank.layout.elements));
  for (const FlatState& moment : rank.moments) send(bytes_of(moment.values.data, moment_elements(rank)));

  std::vector<TensorState> states = rank.reducer.tensor_state();
  std::erase_if(states, std::not_fn(&TensorState::same_on_all_ranks));
  size_t all = 0;
  for (const TensorState& state : states) all += static_cast<size_t>(state.bytes());
  std::vector<std::byte> values(all);
  const FinishOnError finish(rank.stream);
  const auto each = [&](auto&& what) {
    size_t at = 0;
    for (const TensorState& state : states) {
      const auto bytes = static_cast<size_t>(state.bytes());
      what(state, std::span(values).subspan(at, bytes));
      at += bytes;
    }
    rank.stream.synchronize();
  };
  if (!joins) {
    each([&](const TensorState& state, std::span<std::byte> to) { state.read(rank.stream, 0, to); });
  }
  send(values);
  if (joins) {
    each([&](const TensorState& state, std::span<std::byte> from) { state.write(rank.stream, 0, from); });
  }
}

}  // namespace gradwire
