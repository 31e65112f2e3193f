#include "trainer/config/members.h"

#include <fmt/format.h>

#include <iterator>
#include <sstream>

#include "collectives/transport/transport.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr const char* kMagic = "gradwire-members-1";

}  // namespace

std::string members_text(int launched, const std::string& invitation) {
  return fmt::format("{} {}\n{}", kMagic, launched, invitation);
}

Members read_members(const std::string& path) {
  std::string text;
  try {
    text = read_regular_file(path);
    if (text.empty()) throw BadInput(path + ": the file is empty");
  } catch (const BadInput& error) {
    throw BadInput(
        fmt::format("{}; name the file that the run's --members names, or that is in its "
                    "--checkpoint folder; the file exists from the first step to the end",
                    error.what()));
  }
  std::istringstream lines(text);
  std::string magic, launched;
  lines >> magic >> launched;
  lines.ignore();  // skip the end of the line
  const auto ranks = parse_number(launched, 1, kMostRanks);
  if (magic != kMagic || !ranks) {
    throw BadInput(path + ": not a list of a run's ranks; name the file of the run's --members");
  }
  Members members{.launched = *ranks};
  members.invitation.assign(std::istreambuf_iterator<char>(lines), {});
  return members;
}

}  // namespace gradwire
