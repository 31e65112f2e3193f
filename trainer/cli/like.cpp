// `train --like LOG`: repeats a run with the settings of its log.

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string_view>

#include "trainer/cli/flags.h"
#include "trainer/log/records.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {
namespace {

// Returns a run's record in which each key has the text or the number of its flag, as resolve() takes it.
Json with_flag_values(Json record, bool launched) {
  const std::string optimizer = record.at("optimizer");
  if (optimizer == "dion") {  // resolve_matrix_optimizer() adds it to the compression
    CompressionSpec wire = CompressionSpec::parse(record.at("compression").get<std::string>()), codec;
    codec.method = wire.method, codec.rank = wire.rank, codec.mu = wire.mu, codec.orth = wire.orth;
    record["optimizer"] = fmt::format("{},lr={}", codec.to_string(), record.at("dion_lr").dump());
    const CompressionSpec plain;
    wire.method = plain.method, wire.rank = plain.rank, wire.mu = plain.mu, wire.orth = plain.orth;
    std::erase_if(wire.dense, [](const std::string& name) {
      return std::ranges::find(kOuterMatrices, name) != std::end(kOuterMatrices);
    });
    record["compression"] = wire.to_string();
  } else if (optimizer == "muon") {
    record["optimizer"] =
        fmt::format("muon:mu={},lr={}", record.at("mu").dump(), record.at("muon_lr").dump());
  }
  if (record.contains("beta1")) record["momentum"] = record["beta1"];
  if (record.value("elastic_batch", "") == name(ElasticBatch::keep_local))
    record["elastic"] = record.at("elastic").get<std::string>() + ",keep-local";
  // These defaults follow other flags, which may be given.
  const double steps = record.at("steps"), epochs = record.at("epochs");
  const double epoch = epochs > 0 ? std::round(steps / epochs) : steps;
  if (record.at("warmup_steps") == std::min(std::floor(steps / 10), epoch)) record.erase("warmup_steps");
  if (record.value("gradient_group", 0) == kDefaultGradientGroup) record.erase("gradient_group");
  if (launched) record.erase("ranks");
  record.erase("epochs");  // --steps has the same meaning
  record.erase("checkpoint");
  return record;
}

}  // namespace

std::vector<std::string> flags_like(const std::string& log, const CLI::App& train, bool launched) {
  std::string first;
  std::getline(std::istringstream(read_regular_file(log)), first);
  if (!is_run_record(first))
    throw BadInput("--like {}: not the log of a run; name the file of `gradwire train --log`", log);
  std::vector<std::string> words;
  std::vector<const CLI::Option*> used;
  const auto given = [&](const CLI::Option* option) {
    return option->count() > 0 || std::ranges::find(used, option) != used.end();
  };
  try {
    const Json record = with_flag_values(parse_json(first), launched);
    for (const Setting& row : settings()) {
      const bool written = std::string_view(row.group) == "Output";
      if ((row.commands & Setting::kTrain) == 0 || row.key == nullptr || written) continue;
      const Json value = value_of(row, record);
      const CLI::Option* option = train.get_option(row.flag);
      // A number outside of its flag's range was not given.
      const bool outside = value.is_number() && *row.values.words == '\0' &&
                           (value.get<double>() < row.values.least || value.get<double>() > row.values.most);
      if (value.is_null() || value == false || outside || given(option)) continue;
      if (std::ranges::any_of(option->get_excludes(), given)) continue;
      if (!std::ranges::all_of(option->get_needs(), given)) continue;
      used.push_back(option);
      words.push_back(
          fmt::format("{}={}", row.flag, value.is_string() ? value.get<std::string>() : value.dump()));
    }
  } catch (const Json::exception&) {
    throw BadInput("--like {}: its first line lacks settings of a run, or is damaged", log);
  }
  return words;
}

}  // namespace gradwire
