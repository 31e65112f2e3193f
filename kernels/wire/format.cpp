#include "kernels/wire/format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>

#include "kernels/wire/block_formats.h"
#include "kernels/wire/floats.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {

bool FormatOption::set(std::string_view text) const {
  if (const auto word = std::ranges::find(words, text); word != words.end()) {
    *value = static_cast<int>(word - words.begin());
    return true;
  }
  const auto number = parse_number<int>(text, least, most);
  if (!words.empty() || !number || (power_of_two && (*number & (*number - 1)) != 0)) return false;
  *value = *number;
  return true;
}

std::string FormatOption::text() const {
  return words.empty() ? fmt::format("{}", *value) : fmt::format("{}", words[static_cast<size_t>(*value)]);
}

std::string FormatOption::legal() const {
  if (!words.empty()) return fmt::format("one of {}", fmt::join(words, "|"));
  return fmt::format("a {} from {} to {}", power_of_two ? "power of two" : "number", least, most);
}

// The table of wire formats, and the dispatch of each op by the stream's device.

namespace {

// Calls the host or CUDA side of an op, depending on the stream's device. Where CUDA kernels run on the CPU
// there are no CUDA streams: the table leads to the kernels only.
#ifdef GRADWIRE_SIMT_TESTS
#define GW_ENQUEUE(stream, name, op, ...) (void)stream, cuda::op(nullptr, __VA_ARGS__)
#else
#define GW_ENQUEUE(stream, name, op, ...) \
  detail::dispatch(stream, name, host::op, GW_CUDA_SIDE(op), __VA_ARGS__)
#endif

class Fp32Format final : public WireFormat {
 public:
  constexpr Fp32Format() {
    name = "fp32";
    summary = "the values themselves";
    source = "IEEE 754";
    exact = true;
  }
  double error_bound(Rounding) const override { return 0; }
  int64_t bytes(int64_t count) const override { return count * 4; }
  void reduce_encode(const Stream&, const ReduceEncode&) const override { no_ops(); }
  void decode(const Stream&, const Decode&) const override { no_ops(); }
  void reference_reduce_encode(const ReduceEncode&) const override { no_ops(); }
  void reference_decode(const Decode&) const override { no_ops(); }

 private:
  [[noreturn]] static void no_ops() { throw Error("fp32 is exact: it has no encoder"); }
};

class Bf16Format final : public WireFormat {
 public:
  constexpr Bf16Format() {
    name = "bf16";
    summary = "the upper halves of the floats";
    source = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019";
    stochastic = true;
    gaussian_error = 2.7e-6;
  }
  double error_bound(Rounding how) const override {
    return small_float_bound(7, how == Rounding::stochastic);
  }
  int64_t bytes(int64_t count) const override { return count * 2; }
  void reduce_encode(const Stream& stream, const ReduceEncode& a) const override {
    GW_ENQUEUE(stream, "bf16_reduce_encode", bf16_reduce_encode, a);
  }
  void decode(const Stream& stream, const Decode& a) const override {
    GW_ENQUEUE(stream, "bf16_decode", bf16_decode, a);
  }
  void reference_reduce_encode(const ReduceEncode& a) const override { reference::bf16_reduce_encode(a); }
  void reference_decode(const Decode& a) const override { reference::bf16_decode(a); }
};

template <typename F>
class BlockFormat final : public WireFormat {
 public:
  BlockFormat() {
    name = kNames<F>.format;
    summary = F::kSummary;
    source = F::kSource;
    stochastic = F::kStochastic;
    rounding = F::kRounding;
    if constexpr (requires { F::kSelects; }) selects = F::kSelects;
    read_coder();
  }
  double error_bound(Rounding how) const override {
    return coder_.format.error_bound(how == Rounding::stochastic);
  }
  int64_t bytes(int64_t count) const override {
    if constexpr (requires { F::wire_bytes(count); }) {
      return F::wire_bytes(count);
    } else {
      return coder_.blocks(count) * coder_.bytes();
    }
  }
  void reduce_encode(const Stream& stream, const ReduceEncode& a) const override {
    GW_ENQUEUE(stream, kNames<F>.reduce_encode, reduce_encode<F>, coder_, a);
  }
  void decode(const Stream& stream, const Decode& a) const override {
    GW_ENQUEUE(stream, kNames<F>.decode, decode<F>, coder_, a);
  }
  void reference_reduce_encode(const ReduceEncode& a) const override { reference::reduce_encode(coder_, a); }
  void reference_decode(const Decode& a) const override { reference::decode(coder_, a); }

  std::vector<FormatOption> choices() override {
    std::vector<FormatOption> all = coder_.format.options();
    if (F::kRotation == Rotation::optional) {
      all.push_back({.key = "rotate", .value = &rotate_, .words = {"off", "hadamard"}});
    }
    return all;
  }
  std::string problem() const override {
    if constexpr (requires { coder_.format.problem(); }) return coder_.format.problem();
    return {};
  }
  void settle() override { read_coder(); }
  std::vector<const char*> examples() const override {
    std::vector<const char*> all(std::begin(F::kExamples), std::end(F::kExamples));
    if (F::kRotation == Rotation::optional) all.push_back("rotate=hadamard");
    return all;
  }
  std::unique_ptr<WireFormat> copy() const override { return std::make_unique<BlockFormat>(*this); }

 private:
  void read_coder() {
    coder_.rotate = F::kRotation == Rotation::always || rotate_ != 0;
    granularity = coder_.block();
    masks = coder_.masks();
    if constexpr (requires { coder_.format.clips(); }) clips = coder_.format.clips();
    gaussian_error = coder_.format.gaussian_error(coder_.rotate);
  }
  BlockCoder<F> coder_;
  int rotate_ = 0;
};

constinit const Fp32Format kFp32Format;
constinit const Bf16Format kBf16Format;

std::string options_of(WireFormat& format, WireFormat& defaults) {
  std::string text;
  const auto mine = format.choices(), theirs = defaults.choices();
  for (size_t i = 0; i < mine.size(); ++i) {
    if (*mine[i].value == *theirs[i].value) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", mine[i].key, mine[i].text());
  }
  return text;
}

}  // namespace

constinit const Wire kFp32 = &kFp32Format, kBf16 = &kBf16Format;

namespace {

// Threads may read an older version while a format is added, so adding one makes a new version.
struct Table {
#define GW_DEFINE(F, NAME) new BlockFormat<F>,
  std::deque<std::vector<Wire>> versions{{kFp32, kBf16, GW_BLOCK_FORMATS(GW_DEFINE)}};
#undef GW_DEFINE
  std::mutex mutex;  // guards `versions`
  std::atomic<const std::vector<Wire>*> newest{&versions.back()};
};
Table& table() {
  // The table is never destroyed, because other static objects use formats until the program ends.
  static auto& only = *new Table;
  return only;
}

}  // namespace

std::span<const Wire> wire_formats() {
  return *table().newest.load(std::memory_order_acquire);
}

Wire add_wire_format(std::unique_ptr<const WireFormat> format) {
  Table& all = table();
  std::lock_guard lock(all.mutex);
  if (const Wire known = find_wire_format(format->name)) return known;
  std::vector<Wire> next = all.versions.back();
  next.push_back(format.release());
  all.newest.store(&all.versions.emplace_back(std::move(next)), std::memory_order_release);
  return all.versions.back().back();
}

Wire find_wire_format(std::string_view name) {
  const auto all = wire_formats();
  const auto at = std::ranges::find(all, name, &WireFormat::name);
  return at != all.end() ? *at : nullptr;
}

Wire intern_wire_format(WireFormat& variant) {
  static std::mutex mutex;
  static auto& variants = *new std::vector<Wire>;
  static auto& texts = *new std::deque<std::string>;  // texts of the formats' options
  const Wire entry = find_wire_format(variant.name);
  const std::string options = options_of(variant, *entry->copy());
  if (options.empty()) return entry;
  std::lock_guard lock(mutex);
  for (Wire known : variants) {
    if (known->name == entry->name && known->options == options) return known;
  }
  variant.settle();
  variant.options = texts.emplace_back(options).c_str();
  variants.push_back(variant.copy().release());
  return variants.back();
}

Wire wire_format(std::string_view spec) {
  const size_t colon = spec.find(':');
  const Wire entry = find_wire_format(spec.substr(0, colon));
  if (entry == nullptr || colon == std::string_view::npos) return entry;
  auto variant = entry->copy();
  for (std::string_view rest = spec.substr(colon + 1); !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const size_t equals = item.find('=');
    bool set = false;
    for (const FormatOption& option : variant->choices()) {
      if (option.key == item.substr(0, equals)) set = option.set(item.substr(equals + 1));
    }
    if (!set) throw Error("wire_format: bad option '{}' in '{}'", item, spec);
  }
  return intern_wire_format(*variant);
}

std::vector<std::pair<std::string, std::string>> option_texts(Wire format) {
  std::vector<std::pair<std::string, std::string>> all;
  const auto variant = format->copy();
  for (const FormatOption& o : variant != nullptr ? variant->choices() : std::vector<FormatOption>()) {
    all.emplace_back(fmt::format("{}={}", o.key, o.text()), o.words.empty()
                                                                ? fmt::format("{}..{}", o.least, o.most)
                                                                : fmt::to_string(fmt::join(o.words, "|")));
  }
  if (format->stochastic) {
    all.emplace_back(format->rounding == Rounding::nearest ? "round=nearest" : "round=stochastic",
                     "nearest|stochastic");
  }
  return all;
}

std::vector<Wire> example_wire_formats() {
  std::vector<Wire> all;
  for (Wire format : wire_formats()) {
    all.push_back(format);
    for (const char* options : format->examples()) {
      all.push_back(wire_format(fmt::format("{}:{}", format->name, options)));
    }
  }
  return all;
}

}  // namespace gradwire
