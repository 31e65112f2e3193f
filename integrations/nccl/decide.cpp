#include "integrations/nccl/decide.h"

#include <fmt/format.h>

#include <charconv>

#include "runtime/error.h"
#include "runtime/mix.h"

namespace gradwire::interposer {

int64_t parse_bytes(const std::string& text) {
  int64_t value = -1;
  const char* end = text.data() + text.size();
  auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || value < 0) return -1;
  const std::string unit(at, end);
  int shift = 0;
  if (unit == "K" || unit == "k")
    shift = 10;
  else if (unit == "M" || unit == "m")
    shift = 20;
  else if (unit == "G" || unit == "g")
    shift = 30;
  else if (!unit.empty())
    return -1;
  return value > (INT64_MAX >> shift) ? -1 : value << shift;
}

Settings Settings::read(const std::function<const char*(const char*)>& lookup) {
  Settings s;
  auto off = [&](const std::string& why) {
    s.on = false;
    if (s.why_off.empty()) s.why_off = why;
  };
  auto value = [&](const char* name) {
    const char* text = lookup(name);
    return std::string(text != nullptr ? text : "");
  };
  auto flag = [&](const char* name) {
    const std::string text = value(name);
    return !text.empty() && text != "0";
  };
  auto bytes = [&](const char* name, int64_t& out) {
    const std::string text = value(name);
    if (text.empty()) return;
    const int64_t parsed = parse_bytes(text);
    if (parsed < 0) return off(fmt::format("{}='{}' is not a size such as 4M", name, text));
    out = parsed;
  };
  const std::string spec = value("GRADWIRE_NCCL_SPEC");
  try {
    s.spec = CompressionSpec::parse(spec.empty() ? "bf16" : spec);
    if (s.spec.method != CompressionSpec::Method::wire) {
      off(fmt::format(
          "GRADWIRE_NCCL_SPEC={} needs the shapes of the model's tensors, but a call of ncclAllReduce has "
          "none; name a wire format, such as bf16, or use the PyTorch hook",
          spec));
    }
    if (!s.spec.residual->exact) {
      off(fmt::format("GRADWIRE_NCCL_SPEC={}: residuals of intercepted calls are FP32; drop residual={}",
                      spec, s.spec.residual->name));
    }
  } catch (const BadInput& error) {
    off(fmt::format("GRADWIRE_NCCL_SPEC: {}", error.what()));
  }
  bytes("GRADWIRE_NCCL_MIN_BYTES", s.min_bytes);
  bytes("GRADWIRE_NCCL_MAX_STATE_BYTES", s.max_state_bytes);
  if (const std::string text = value("GRADWIRE_NCCL_RANKS_PER_NODE"); !text.empty()) {
    const int64_t ranks = parse_bytes(text);
    if (ranks < 1 || ranks > 1 << 20)
      off(fmt::format("GRADWIRE_NCCL_RANKS_PER_NODE='{}' is not a number of ranks", text));
    else
      s.ranks_per_node = static_cast<int>(ranks);
  }
  if (s.spec.schedule == ScheduleKind::hierarchical && s.ranks_per_node == 0) {
    off("schedule=hierarchical needs GRADWIRE_NCCL_RANKS_PER_NODE");
  }
  if (s.spec.schedule == ScheduleKind::nccl) {
    off("schedule=nccl is what a call of ncclAllReduce is without the interposer; name another schedule");
  }
  if (flag("GRADWIRE_NCCL_DISABLE")) off("GRADWIRE_NCCL_DISABLE is set");
  s.dry_run = flag("GRADWIRE_NCCL_DRY_RUN");
  s.quiet = flag("GRADWIRE_NCCL_QUIET");
  return s;
}

uint64_t Settings::fingerprint() const {
  if (!on) return 0;
  uint64_t hash = mix(1, static_cast<uint64_t>(min_bytes));
  hash = mix(mix(hash, static_cast<uint64_t>(ranks_per_node)), dry_run ? 1 : 0);
  for (char c : spec.to_string()) hash = mix(hash, static_cast<uint64_t>(c));
  return (hash >> 12) | 1;
}

bool may_compare(const Request& r) {
  return r.type == ncclFloat32 && (r.op == ncclSum || r.op == ncclAvg) && r.group_depth == 0 && !r.capturing;
}

Path decide(const Settings& s, const Request& r) {
  if (!s.on || r.type != ncclFloat32 || (r.op != ncclSum && r.op != ncclAvg)) return Path::untouched;
  if (r.count <= 0 || r.count < (s.min_bytes + 3) / 4) return Path::untouched;
  if (r.group_depth > 0) return Path::untouched_group;
  if (r.capturing) return Path::untouched_capture;
  return Path::compressed;
}

}  // namespace gradwire::interposer
