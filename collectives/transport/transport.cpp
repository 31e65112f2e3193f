#include "collectives/transport/transport.h"

#include <fmt/format.h>

#include "runtime/error.h"

namespace gradwire {

void Transport::send_message(const std::string&) {
  throw Error(fmt::format("the {} transport carries no messages", name()));
}

std::string Transport::take_message(int) {
  throw Error(fmt::format("the {} transport carries no messages", name()));
}

std::unique_ptr<Transport> Transport::shrink(const std::vector<int>&) {
  throw BadInput(fmt::format("the {} transport cannot go on without some of its ranks", name()));
}

std::unique_ptr<Transport> Transport::split(const std::vector<int>&) {
  throw BadInput(fmt::format("the {} transport cannot be split", name()));
}

}  // namespace gradwire
