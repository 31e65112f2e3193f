#include "integrations/nccl/decide.h"

#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"
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

namespace {

using Lookup = std::function<const char*(const char*)>;

class SettingsReader {
 public:
  explicit SettingsReader(const Lookup& lookup) : lookup_(lookup) {}

  Settings read() {
    const std::string spec = value("GRADWIRE_NCCL_SPEC");
    if (spec == "off") {
      turn_off("GRADWIRE_NCCL_SPEC is off");
      return settings_;
    }
    read_spec(spec.empty() ? "bf16" : spec);
    read_bytes("GRADWIRE_NCCL_MIN_BYTES", settings_.min_bytes);
    read_bytes("GRADWIRE_NCCL_MAX_STATE_BYTES", settings_.max_state_bytes);
    read_ranks_per_node();
    check_schedule();
    read_dry_run();
    return settings_;
  }

 private:
  void turn_off(const std::string& why) {
    settings_.on = false;
    if (settings_.why_off.empty()) settings_.why_off = why;
  }

  std::string value(const char* name) const {
    const char* text = lookup_(name);
    return text != nullptr ? text : "";
  }

  void read_spec(const std::string& text) {
    CompressionSpec& spec = settings_.spec;
    try {
      spec = CompressionSpec::parse(text);
    } catch (const BadInput& error) {
      return turn_off(fmt::format("GRADWIRE_NCCL_SPEC: {}", error.what()));
    }
    if (spec.method != CompressionSpec::Method::wire) {
      turn_off(fmt::format(
          "GRADWIRE_NCCL_SPEC={} needs the shapes of the model's tensors, but a call of ncclAllReduce has "
          "none; name a wire format, such as bf16, or use the PyTorch hook",
          text));
    }
    if (spec.method == CompressionSpec::Method::wire && spec.needs_reducer()) {
      turn_off(fmt::format(
          "GRADWIRE_NCCL_SPEC={} needs steps or tensors, which calls of ncclAllReduce do not have; "
          "drop ef=ef21, "
          "start, ramp, momentum and max_norm, or use the PyTorch hook",
          text));
    }
    if (!spec.residual->exact) {
      turn_off(fmt::format("GRADWIRE_NCCL_SPEC={}: residuals of intercepted calls are FP32; drop residual={}",
                           text, spec.residual->name));
    }
  }

  void read_bytes(const char* name, int64_t& bytes) {
    const std::string text = value(name);
    if (text.empty()) return;
    const int64_t parsed = parse_bytes(text);
    if (parsed < 0) return turn_off(fmt::format("{}='{}' is not a size such as 4M", name, text));
    bytes = parsed;
  }

  void read_ranks_per_node() {
    constexpr const char* kName = "GRADWIRE_NCCL_RANKS_PER_NODE";
    const std::string text = value(kName);
    if (text.empty()) return;
    const int64_t ranks = parse_bytes(text);
    if (ranks < 1 || ranks > 1 << 20)
      return turn_off(fmt::format("{}='{}' must be a number of ranks, such as 8", kName, text));
    settings_.ranks_per_node = static_cast<int>(ranks);
  }

  void check_schedule() {
    if (settings_.spec.schedule == ScheduleKind::hierarchical && settings_.ranks_per_node == 0)
      turn_off("schedule=hierarchical needs GRADWIRE_NCCL_RANKS_PER_NODE");
    if (settings_.spec.schedule == ScheduleKind::nccl) {
      turn_off("schedule=nccl is ncclAllReduce without the interposer; name another schedule");
    }
  }

  void read_dry_run() {
    try {
      settings_.dry_run = environment_flag("GRADWIRE_NCCL_DRY_RUN", lookup_);
    } catch (const BadInput& error) {
      turn_off(error.what());
    }
  }

  const Lookup& lookup_;
  Settings settings_;
};

}  // namespace

Settings Settings::read(const std::function<const char*(const char*)>& lookup) {
  return SettingsReader(lookup).read();
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

Decision decide(const Settings& s, const Request& r) {
  if (!s.on || r.type != ncclFloat32 || (r.op != ncclSum && r.op != ncclAvg)) return Decision::untouched;
  if (r.count <= 0 || r.count < (s.min_bytes + 3) / 4) return Decision::untouched;
  if (r.group_depth > 0) return Decision::untouched_group;
  if (r.capturing) return Decision::untouched_capture;
  return Decision::compressed;
}

}  // namespace gradwire::interposer
