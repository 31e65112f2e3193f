#include "collectives/agreement/statements.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

// Largest number of bytes of a quoted text; longer texts are truncated.
constexpr size_t kQuoted = 256;

std::string clipped(const std::string& text) {
  std::string bytes = text;
  if (bytes.size() >= kQuoted) bytes.replace(kQuoted - 4, bytes.size(), "...");
  bytes.resize(kQuoted);
  return bytes;
}

// Returns the first rank that differs from rank 0 in this column; 0 if no rank differs.
size_t differing_rank(const std::vector<std::vector<uint64_t>>& all, size_t column) {
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r][column] != all[0][column]) return r;
  }
  return 0;
}

}  // namespace

void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what) {
  std::vector<uint64_t> digests;
  uint64_t all = 0;
  for (const std::string& statement : statements) {
    digests.push_back(mix(0, statement));
    all = mix(all, statement);
  }
  const auto counts =
      all_gather<uint64_t>(transport, stream, {static_cast<uint64_t>(statements.size()), all}, what);
  if (differing_rank(counts, 0) == 0 && differing_rank(counts, 1) == 0) return;

  // Find the first statement that differs. Some ranks may lack that statement.
  uint64_t least = counts[0][0];
  for (const auto& c : counts) least = std::min(least, c[0]);
  digests.resize(static_cast<size_t>(least));
  const auto theirs = all_gather(transport, stream, digests, what + ", finding what differs");
  size_t at = 0;
  while (at < digests.size() && differing_rank(theirs, at) == 0) ++at;
  const std::string mine = at < statements.size() ? statements[at] : "nothing more";
  const auto texts = all_gather_bytes(transport, stream, clipped(mine), what + ", quoting what differs");
  size_t odd = 1;
  while (odd + 1 < texts.size() && texts[odd] == texts[0]) ++odd;
  const std::string text = fmt::format("ranks disagree: {} has \"{}\" on rank 0, \"{}\" on rank {}", what,
                                       texts[0].c_str(), texts[odd].c_str(), odd);
  transport.abort(text);
  throw CommError("rank {}: {}", transport.rank(), text);
}

std::vector<std::string> all_gather_bytes(Transport& transport, const Stream& stream, std::string_view mine,
                                          const std::string& what) {
  const int world = transport.world(), rank = transport.rank();
  const size_t bytes = mine.size();
  const auto count = static_cast<int64_t>(bytes);
  Buffer all = make_buffer<char>(transport.device(), count * world);
  const auto part = [&](int of) { return all.as<char>() + of * count; };
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world && bytes > 0; ++peer) {
    if (peer == rank) continue;
    transfers.push_back({Transfer::Kind::send, peer, part(rank), bytes});
    transfers.push_back({Transfer::Kind::receive, peer, part(peer), bytes});
  }
  const ExchangeLabel label{mix(mix(0x616c6c, static_cast<uint64_t>(count)), what), what};
  const Call call{label.tag, what};
  const FinishOnError finish(stream);
  copy(stream, part(rank), mine.data(), bytes);
  transport.begin_call(stream, call);
  transport.exchange(stream, transfers, label);
  const std::vector<char> flat = to_host(stream, all.as<const char>(), count * world);
  transport.check();
  std::vector<std::string> result;
  for (int r = 0; r < world; ++r)
    result.emplace_back(flat.begin() + r * count, flat.begin() + (r + 1) * count);
  return result;
}

// Cristian's algorithm: a rank asks rank 0 for the time. Rank 0's answer was correct at some moment between
// the request and the reply.

SharedInstant agree_on_instant(Transport& transport,
                               const std::function<std::chrono::steady_clock::time_point()>& now) {
  constexpr int kTries = 8;
  const auto now_ns = [&] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now().time_since_epoch()).count();
  };
  const auto instant = [](int64_t ns) {
    return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
  };
  const int64_t start = now_ns();
  if (transport.world() == 1) return {instant(start), 0};
  const Device device = transport.device();
  const Stream stream =
      device.is_host() ? Stream::immediate_host() : Stream::create(device, "clock alignment");
  Buffer value = make_buffer<int64_t>(device, 1);
  fill_zero(stream, value.data(), value.bytes());
  const Call call{0x636c6f636b, "agreeing on the time"};
  const ExchangeLabel label{call.hash, call.what};
  std::vector<Transfer> transfers;
  transport.begin_call(stream, call);
  const auto exchange = [&](Transfer::Kind kind, int peer) {
    transfers = {{kind, peer, value.data(), value.bytes()}};
    transport.exchange(stream, transfers, label);
    stream.synchronize();
  };
  const auto receive = [&](int from) {
    exchange(Transfer::Kind::receive, from);
    return to_host(stream, value.as<const int64_t>(), 1)[0];
  };
  const auto send = [&](int to, int64_t number) {
    store(stream, value.data(), &number, sizeof number);
    exchange(Transfer::Kind::send, to);
  };
  if (transport.rank() == 0) {
    for (int rank = 1; rank < transport.world(); ++rank) {
      for (int i = 0; i < kTries; ++i) {
        receive(rank);
        send(rank, now_ns());
      }
      send(rank, start);
    }
    transport.check();
    return {instant(start), 0};
  }
  // ahead: how far rank 0's clock is ahead of this rank's clock, in nanoseconds
  int64_t round_trip = std::numeric_limits<int64_t>::max(), ahead = 0;
  for (int i = 0; i < kTries; ++i) {
    const int64_t asked = now_ns();
    send(0, asked);
    const int64_t theirs = receive(0);
    const int64_t answered = now_ns();
    if (answered - asked >= round_trip) continue;
    round_trip = answered - asked;
    ahead = theirs - (asked + round_trip / 2);
  }
  const int64_t theirs = receive(0);
  transport.check();
  if (std::abs(ahead) <= round_trip / 2) return {instant(theirs), 0};
  return {instant(theirs - ahead), static_cast<double>(round_trip) / 2e3};
}

}  // namespace gradwire
