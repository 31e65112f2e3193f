#include "collectives/transport/transport.h"

#include "runtime/error.h"

namespace gradwire {

void Transport::send_message(const std::string&) {
  throw Error(std::string("the ") + name() + " transport carries no messages");
}

std::unique_ptr<Transport> Transport::shrink(const std::vector<int>&) {
  throw BadInput(std::string("the ") + name() + " transport cannot go on without some of its ranks");
}

std::string Transport::take_message(int) {
  throw Error(std::string("the ") + name() + " transport carries no messages");
}

}  // namespace gradwire
