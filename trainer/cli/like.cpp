// `train --like LOG`: repeats a run with the flags in its log.

#include <algorithm>
#include <sstream>
#include <string_view>

#include "trainer/cli/flags.h"
#include "trainer/log/records.h"

namespace gradwire {

std::vector<std::string> repeatable_flags(const CLI::App& command) {
  std::vector<std::string> words;
  for (const Setting& row : settings()) {
    const std::string_view group = row.group, flag = row.flag != nullptr ? row.flag : "";
    const bool writes = group == "Output" || (group == "Checkpoints" && flag != "--init");
    if ((row.commands & Setting::kTrain) == 0 || row.key == nullptr || writes) continue;
    const CLI::Option* option = command.get_option_no_throw(row.flag);
    if (option != nullptr && option->count() == 1)
      words.push_back(fmt::format("{}={}", flag, option->results()[0]));
  }
  return words;
}

std::vector<std::string> flags_like(const std::string& log, const CLI::App& train, bool launched) {
  std::string first;
  std::getline(std::istringstream(read_regular_file(log)), first);
  if (!is_run_record(first))
    throw BadInput("--like {}: not the log of a run; name the file of `gradwire train --log`", log);
  const auto given = [](const CLI::Option* option) { return option->count() > 0; };
  std::vector<std::string> words;
  try {
    const Json record = parse_json(first);
    // A launcher sets the number of ranks, which is a flag only where ranks are threads.
    std::vector<std::string> flags{fmt::format("--ranks={}", record.at("ranks").get<int>())};
    for (const Json& flag : record.at("flags"))
      if (!flag.get<std::string>().starts_with("--ranks=")) flags.push_back(flag);
    if (launched) flags.erase(flags.begin());
    for (const std::string& word : flags) {
      const CLI::Option* option = train.get_option(word.substr(0, word.find('=')));
      if (!given(option) && std::ranges::none_of(option->get_excludes(), given)) words.push_back(word);
    }
  } catch (const Json::exception&) {
    throw BadInput("--like {}: its first line lacks the flags of a run, or is damaged", log);
  } catch (const CLI::OptionNotFound& error) {
    throw BadInput("--like {}: {}", log, error.what());
  }
  return words;
}

}  // namespace gradwire
