#include "integrations/nccl/decide.h"

#include <fmt/format.h>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"
#include "runtime/util/parse.h"

namespace gradwire::interposer {

int64_t parse_bytes(const std::string& text) {
  constexpr std::string_view kUnits = "kKmMgG";
  const size_t unit = text.empty() ? std::string_view::npos : kUnits.find(text.back());
  const int shift = unit == std::string_view::npos ? 0 : 10 * (1 + static_cast<int>(unit / 2));
  const auto value =
      parse_number<int64_t>(text.substr(0, text.size() - (shift > 0 ? 1 : 0)), 0, INT64_MAX >> shift);
  return value ? *value << shift : -1;
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
    try {
      return environment_flag(name, lookup);
    } catch (const BadInput& error) {
      off(error.what());
      return false;
    }
  };
  auto bytes = [&](const char* name, int64_t& out) {
    const std::string text = value(name);
    if (text.empty()) return;
    const int64_t parsed = parse_bytes(text);
    if (parsed < 0) return off(fmt::format("{}='{}' is not a size such as 4M", name, text));
    out = parsed;
  };
  const std::string spec = value("GRADWIRE_NCCL_SPEC");
  if (spec == "off") {
    off("GRADWIRE_NCCL_SPEC is off");
    return s;
  }
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
  s.dry_run = flag("GRADWIRE_NCCL_DRY_RUN");
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
