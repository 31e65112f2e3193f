#include "trainer/measure/network.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runtime/util/parse.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) line.pop_back();
  return line;
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Network find_network(const std::string& sys) {
  Network network;
  for (const fs::path& folder : entries(fs::path(sys) / "class/net")) {
    NetInterface interface { .name = folder.filename().string() };
    if (interface.name == "lo" || !fs::is_directory(folder)) continue;
    interface.up = first_line(folder / "operstate") == "up";
    interface.megabits = parse_number<int64_t>(first_line(folder / "speed"), 1).value_or(-1);
    network.interfaces.push_back(interface);
  }
  for (const fs::path& device : entries(fs::path(sys) / "class/infiniband")) {
    for (const fs::path& folder : entries(device / "ports")) {
      InfinibandPort port{.device = device.filename().string(),
                          .link = first_line(folder / "link_layer"),
                          .rate = first_line(folder / "rate"),
                          .active = first_line(folder / "state").find("ACTIVE") != std::string::npos};
      port.port = parse_number<int>(folder.filename().string()).value_or(port.port);
      network.ports.push_back(port);
    }
  }
  return network;
}

}  // namespace gradwire
