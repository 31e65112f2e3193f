#include "collectives/transport/emulated_link.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <optional>
#include <string_view>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr double kMinRate = 1e5, kMaxRate = 1e12;
constexpr double kMaxDelay = 10e9;  // in nanoseconds
constexpr double kMaxBurst = 1e9;   // in bytes
constexpr double kMaxTime = 1e15;   // until the rate changes, in nanoseconds
constexpr std::string_view kThen = ",then=";
constexpr const char* kRate = "a rate from 100kbit to 1Tbit";

struct Unit {
  const char* name;
  double factor;
};
constexpr std::array<Unit, 4> kRates{{{"Tbit", 1e12}, {"Gbit", 1e9}, {"Mbit", 1e6}, {"kbit", 1e3}}};
constexpr std::array<Unit, 3> kDelays{{{"s", 1e9}, {"ms", 1e6}, {"us", 1e3}}};
constexpr std::array<Unit, 4> kSizes{{{"MiB", 1 << 20}, {"MB", 1e6}, {"KiB", 1 << 10}, {"kB", 1e3}}};

// Returns the value of a number with a unit; nullopt if the text is anything else.
template <size_t N>
std::optional<double> value_of(std::string_view text, const std::array<Unit, N>& units) {
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  for (const Unit& unit : units) {
    const std::string_view word = text.substr(digits), name = unit.name;
    if (!std::equal(word.begin(), word.end(), name.begin(), name.end(),
                    [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); }))
      continue;
    const auto number = parse_number<double>(text.substr(0, digits), 0.0, 1e9);
    if (number) return *number * unit.factor;
  }
  return {};
}

// Returns a rate as this file writes it: Gbps, Gb/s, Gbit/s and G are Gbit. GBps would be bytes.
std::string bits(std::string_view text) {
  for (const std::string_view unit : {"bps", "b/s", "bit/s"}) {
    if (text.ends_with(unit)) return fmt::format("{}bit", text.substr(0, text.size() - unit.size()));
  }
  const size_t digits = text.find_first_not_of("0123456789.");
  const bool is_prefix = digits + 1 == text.size() && text.find_last_of("TGgMmKk") == digits;
  return is_prefix ? fmt::format("{}bit", text) : std::string(text);
}

template <size_t N>
std::string text_of_value(double value, const std::array<Unit, N>& units) {
  const auto fits =
      std::find_if(units.begin(), units.end() - 1, [&](const Unit& u) { return value >= u.factor; });
  return fmt::format("{}{}", value / fits->factor, fits->name);
}

}  // namespace

EmulatedLink EmulatedLink::parse(const std::string& text) {
  std::array<std::string_view, 3> parts;
  const std::string_view whole = text;
  const size_t change = whole.find(kThen);
  const std::string_view all = whole.substr(0, change);
  size_t count = 0;
  for (size_t at = 0; at <= all.size(); ++count) {
    const size_t comma = count + 1 < parts.size() ? std::min(all.find(',', at), all.size()) : all.size();
    parts[count] = all.substr(at, comma - at);
    at = comma + 1;
  }
  const auto checked = [&](std::string_view part, const auto& units, double least, double most,
                           const char* what) {
    const auto number = what == kRate ? value_of(bits(part), units) : value_of(part, units);
    if (number && *number >= least && *number <= most) return *number;
    throw BadInput(
        "--link {}: '{}' is not {}; write RATE[,DELAY][,then=RATE@TIME], such as "
        "100Mbit, 1Gbit,20ms or 1Gbit,then=100Mbit@20s",
        text, part, what);
  };
  EmulatedLink link{.bits_per_s = checked(parts[0], kRates, kMinRate, kMaxRate, kRate)};
  if (count > 1) {
    link.delay = std::chrono::nanoseconds(
        std::llround(checked(parts[1], kDelays, 0, kMaxDelay, "a delay from 0us to 10s")));
  }
  if (count > 2)
    link.burst = static_cast<size_t>(checked(parts[2], kSizes, 0, kMaxBurst, "a burst from 0kB to 1000MB"));
  if (change != whole.npos) {
    const std::string_view then = whole.substr(change + kThen.size());
    const size_t at = std::min(then.find('@'), then.size());
    link.then_bits_per_s = checked(then.substr(0, at), kRates, kMinRate, kMaxRate, kRate);
    link.then_after = std::chrono::nanoseconds(std::llround(checked(
        then.substr(std::min(at + 1, then.size())), kDelays, 0, kMaxTime, "a time from 0s to 1000000s")));
  }
  return link;
}

std::string EmulatedLink::to_string() const {
  std::string text = text_of_value(bits_per_s, kRates);
  if (delay.count() > 0 || burst > 0) {
    text += fmt::format(",{}", text_of_value(static_cast<double>(delay.count()), kDelays));
  }
  if (burst > 0) {
    text += burst % 1024 == 0 ? fmt::format(",{}KiB", burst / 1024)
                              : fmt::format(",{}kB", static_cast<double>(burst) / 1e3);
  }
  if (then_bits_per_s > 0) {
    text += fmt::format("{}{}@{}", kThen, text_of_value(then_bits_per_s, kRates),
                        text_of_value(static_cast<double>(then_after.count()), kDelays));
  }
  return text;
}

namespace {

using std::chrono::nanoseconds;

constexpr size_t kPacketPayload = EmulatedLink::kPacketPayload, kPacketHeaders = EmulatedLink::kPacketHeaders;
constexpr std::chrono::microseconds kTurn{100};  // time of a turn on the link
constexpr size_t kMaxPackets = 45;               // of a turn, about as many as TCP passes to a device at once
// After a pause, a receiver may take at once what its link passes in this time, and at least two turns. A
// receiver notices arrivals late if the machine is busy, which must not lower the rate.
constexpr nanoseconds kReceiveBurst = std::chrono::milliseconds(4);

double slowest(const EmulatedLink& link) {
  return link.then_bits_per_s > 0 ? std::min(link.bits_per_s, link.then_bits_per_s) : link.bits_per_s;
}

nanoseconds occupied(size_t bytes, double bits_per_s) {
  const size_t on_wire = bytes + (bytes + kPacketPayload - 1) / kPacketPayload * kPacketHeaders;
  return nanoseconds(std::llround(static_cast<double>(on_wire) * 8e9 / bits_per_s));
}

size_t turn_of(const EmulatedLink& link) {
  const double bytes = slowest(link) / 8 * std::chrono::duration<double>(kTurn).count();
  const auto packets = static_cast<size_t>(bytes / static_cast<double>(kPacketPayload + kPacketHeaders));
  return std::clamp<size_t>(packets, 1, kMaxPackets) * kPacketPayload;
}

}  // namespace

LinkPacer::LinkPacer(const EmulatedLink& link, int world)
    : link_(link),
      world_(world),
      turn_(turn_of(link)),
      burst_(nanoseconds(std::llround(static_cast<double>(link.burst) * 8e9 / link.bits_per_s))),
      receive_burst_(std::max({kReceiveBurst, burst_, 2 * occupied(turn_, slowest(link))})),
      out_(static_cast<size_t>(world)),
      in_(out_.size()),
      turns_(out_.size()),
      queues_(out_.size() * out_.size()) {
  // Senders that begin together then send to different receivers at any time.
  for (int r = 0; r < world; ++r) turns_[static_cast<size_t>(r)] = (r + 1) % world;
}

nanoseconds LinkPacer::duration(size_t bytes, Time time) const {
  return occupied(bytes, link_.bits_per_s_at(time));
}

LinkPacer::Time LinkPacer::pass(Time& bucket, size_t bytes, Time ready) const {
  const Time start = std::max(bucket, ready);
  bucket = start + duration(bytes, start);
  return std::max(ready, bucket - burst_);
}

void LinkPacer::post(Flow& flow, Time now) {
  if (link_.since == Time{}) link_.since = now;
  flow.posted_ = now;
  flow.arrivals_.clear();
  flow.arrived_ = flow.left_ = 0;
  if (flow.bytes == 0 || !link_.between(flow.from, flow.to)) {
    flow.arrivals_.push_back({now, flow.bytes});
    return;
  }
  // Turns that began earlier are not shared with this message. Turns that begin now are shared, so that
  // messages that are posted at the same time take their turns in the order of next_of().
  advance(now - nanoseconds(1));
  flow.left_ = flow.bytes;
  queues_[pair(flow.from, flow.to)].push_back(&flow);
}

void LinkPacer::withdraw(Flow& flow) {
  if (flow.left_ > 0) std::erase(queues_[pair(flow.from, flow.to)], &flow);
  flow.left_ = 0;
}

size_t LinkPacer::arrived(Flow& flow, Time now) {
  advance(now);
  while (!flow.arrivals_.empty() && flow.arrivals_.front().at <= now) {
    flow.arrived_ = flow.arrivals_.front().bytes;
    flow.arrivals_.pop_front();
  }
  return flow.arrived_;
}

LinkPacer::Time LinkPacer::earliest(const Flow& flow, size_t bytes) const {
  const size_t wanted = std::min(flow.arrived_ + bytes, flow.bytes);
  for (const Flow::Arrival& arrival : flow.arrivals_) {
    if (arrival.bytes >= wanted) return arrival.at;
  }
  // The bytes have yet to enter the sender's bucket, after the messages before this message.
  size_t ahead = wanted - (flow.bytes - flow.left_);
  for (const Flow* earlier : queues_[pair(flow.from, flow.to)]) {
    if (earlier == &flow) break;
    ahead += earlier->left_;
  }
  // The rate may change on the way, so the faster of the two gives the earliest time.
  const nanoseconds least = std::min(duration(ahead), duration(ahead, Time::max()));
  const Time full = std::max(out_[static_cast<size_t>(flow.from)], flow.posted_) + least;
  return std::max(flow.posted_, full - burst_) + link_.delay;
}

LinkPacer::Flow* LinkPacer::next_of(int from) const {
  for (int i = 0; i < world_; ++i) {
    const auto& waiting = queues_[pair(from, (turns_[static_cast<size_t>(from)] + i) % world_)];
    if (!waiting.empty()) return waiting.front();
  }
  return nullptr;
}

// Passes everything that begins by `now`, in the order in which it begins.
void LinkPacer::advance(Time now) {
  while (true) {
    Flow* first = nullptr;
    Time start = now;
    for (int from = 0; from < world_; ++from) {
      Flow* flow = next_of(from);
      if (flow == nullptr) continue;
      const Time begins = std::max(out_[static_cast<size_t>(from)] - burst_, flow->posted_);
      if (begins > start || (begins == start && first != nullptr)) continue;
      first = flow;
      start = begins;
    }
    if (first == nullptr) return;
    take_turn(*first, start);
  }
}

// A packet's first bits leave the switch while its sender still sends the last bits of the turn. So the
// receiver's bucket gets the bytes when they begin to arrive.
void LinkPacer::take_turn(Flow& flow, Time start) {
  const size_t bytes = std::min(turn_, flow.left_);
  const Time sent = pass(out_[static_cast<size_t>(flow.from)], bytes, start);
  const Time received = pass(in_[static_cast<size_t>(flow.to)], bytes, start + link_.delay);
  flow.left_ -= bytes;
  flow.arrivals_.push_back({std::max(received, sent + link_.delay), flow.bytes - flow.left_});
  turns_[static_cast<size_t>(flow.from)] = (flow.to + 1) % world_;
  if (flow.left_ == 0) queues_[pair(flow.from, flow.to)].pop_front();
}

size_t LinkPacer::may_receive(int rank, Time now) const {
  const nanoseconds time = std::min(receive_burst_, now + receive_burst_ - in_[static_cast<size_t>(rank)]);
  const double packets =
      static_cast<double>(time.count()) / static_cast<double>(duration(kPacketPayload, now).count());
  return packets < 1 ? 0 : static_cast<size_t>(packets) * kPacketPayload;
}

LinkPacer::Time LinkPacer::may_receive_at(int rank) const {
  const Time full = in_[static_cast<size_t>(rank)];
  return full - receive_burst_ + duration(turn_, full) + nanoseconds(1);
}

void LinkPacer::received(int rank, size_t bytes, Time now) {
  // Reads do not follow the packets' borders, so headers count by share.
  const double packets = static_cast<double>(bytes) / static_cast<double>(kPacketPayload);
  Time& bucket = in_[static_cast<size_t>(rank)];
  bucket = std::max(bucket, now) +
           nanoseconds(std::llround(packets * static_cast<double>(duration(kPacketPayload, now).count())));
}

}  // namespace gradwire
