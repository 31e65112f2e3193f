#include "trainer/cli/matrix_optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/train/layout.h"

namespace gradwire {
namespace {

// Removes the option `key` from a text such as "dion:rank=8,lr=0.1". Returns its value, if the text has it.
std::optional<double> take_number(std::string& text, const std::string& key, double most) {
  size_t at = text.find("," + key + "=");
  if (at == std::string::npos) at = text.find(":" + key + "=");
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + key.size() + 2, end = std::min(text.find(',', begin), text.size());
  const auto value = parse_number(std::string_view(text).substr(begin, end - begin), 0.0, most);
  if (!value)
    throw BadInput(fmt::format("--optimizer {}: {}= is not a number from 0 to {:g}", text, key, most));
  const bool others = end < text.size();
  text = text.substr(0, at) + (others ? text[at] + text.substr(end + 1) : "");
  return value;
}

// Returns the spec of Dion's codec, whose factors travel in the format of `wire`. The embedding of patches
// and the classifier are dense, because Dion is for the matrices between them.
CompressionSpec with_dion(const CompressionSpec& codec, CompressionSpec wire) {
  if (wire.method != CompressionSpec::Method::wire || wire.policy != ResidualPolicy()) {
    throw BadInput(
        fmt::format("--optimizer dion: its factors need a wire format with plain error feedback, not "
                    "--compression {}; use a format such as int8",
                    wire.to_string()));
  }
  wire.method = codec.method, wire.rank = codec.rank, wire.mu = codec.mu, wire.orth = codec.orth;
  for (const char* name : kOuterMatrices) wire.dense.emplace_back(name);
  std::sort(wire.dense.begin(), wire.dense.end());
  wire.dense.erase(std::unique(wire.dense.begin(), wire.dense.end()), wire.dense.end());
  return wire;
}

void resolve_dion(const std::string& text, const std::string& rest, bool automatic,
                  std::vector<CompressionSpec>& compressions) {
  if (automatic) {
    throw BadInput(
        "--compression auto and --optimizer dion cannot be combined: the factors' format is not predicted; "
        "name a spec, such as int8");
  }
  const CompressionSpec codec = CompressionSpec::parse(rest);
  CompressionSpec known;
  known.method = codec.method, known.rank = codec.rank, known.mu = codec.mu, known.orth = codec.orth;
  if (!(codec == known))
    throw BadInput("--optimizer " + text +
                   ": dion takes rank=, mu=, orth= and lr=; give the other options to --compression");
  for (CompressionSpec& spec : compressions) spec = with_dion(codec, spec);
}

}  // namespace

bool is_matrix_optimizer(const std::string& text) {
  return text.starts_with("dion:") || text == "muon" || text.starts_with("muon:");
}

void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions) {
  std::string rest = text;
  const bool muon = text.starts_with("muon");
  config.dion_lr = take_number(rest, "lr", 1e6).value_or(config.dion_lr);
  if (config.lr == 0) throw BadInput("--lr 0: with --optimizer " + text + " it must be more than 0");
  if (!muon) return resolve_dion(text, rest, automatic, compressions);
  config.muon = true;
  config.muon_mu = take_number(rest, "mu", 1).value_or(config.muon_mu);
  if (rest != "muon") throw BadInput("--optimizer " + text + ": muon takes mu= and lr=; drop the rest");
}

void check_muon(const TrainConfig& config) {
  const char* flag = config.shard_optimizer   ? "--shard"
                     : config.overlap_forward ? "--overlap-forward"
                                              : nullptr;
  if (!config.muon || flag == nullptr) return;
  throw BadInput(fmt::format(
      "--optimizer muon needs whole matrices on every rank at the end of the step; drop {}, or use dion",
      flag));
}

}  // namespace gradwire
