#include "collectives/transport/tcp/tcp_growth.h"

#include <fmt/format.h>

#include <iterator>
#include <sstream>

#include "collectives/net/joiner.h"
#include "runtime/util/parse.h"

namespace gradwire {

std::string Growth::encode() const {
  std::string text = fmt::format("{}\n{}\n", name, joined.size());
  for (const std::string& contact : joined) text += contact + "\n";
  return text + location;
}

Growth Growth::decode(const std::string& text) {
  std::istringstream lines(text);
  Growth growth;
  std::string line;
  std::getline(lines, growth.name);
  std::getline(lines, line);
  for (int left = parse_number<int>(line).value_or(0); left > 0 && std::getline(lines, line); --left) {
    growth.joined.push_back(line);
  }
  growth.location.assign(std::istreambuf_iterator<char>(lines), {});
  return growth;
}

// A joiner that does not receive its invitation is detected when the group forms.
void send_admissions(const Growth& growth, const std::vector<Quorum::Joiner>& joiners, int world,
                     int number) {
  const int all = world + static_cast<int>(joiners.size());
  for (size_t i = 0; i < joiners.size(); ++i) {
    const std::string text =
        admission_text(world + static_cast<int>(i), all, number, growth.name, growth.location);
    send_all(joiners[i].socket, StoreMessage{StoreMessage::Op::ok, 0, Quorum::kJoin, text}.encode(),
             SteadyClock::now() + Quorum::kPatience);
  }
}

}  // namespace gradwire
