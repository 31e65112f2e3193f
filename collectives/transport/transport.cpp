#include "collectives/transport/transport.h"

#include "runtime/error.h"

namespace gradwire {

void Transport::send_note(const std::string&) {
  throw Error(std::string("the ") + name() + " transport carries no notes");
}

std::unique_ptr<Transport> Transport::shrink(const std::vector<int>&) {
  throw BadInput(std::string("the ") + name() + " transport cannot go on without some of its ranks");
}

std::string Transport::take_note(int) {
  throw Error(std::string("the ") + name() + " transport carries no notes");
}

}  // namespace gradwire
