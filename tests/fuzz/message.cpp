#include "collectives/net/socket.h"

#include <stdexcept>
#include <string>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "runtime/util/error.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {

// Decodes a control message, also as each message type of the quorum and of admission. Checks that a decoded
// message encodes to the same bytes.
void message(Input input) {
  const std::string bytes(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    if (Message::decode(bytes).encode() != bytes) throw std::logic_error("a message changes when sent on");
  } catch (const CommError&) {
  }
  try {
    Quorum::NextGroup::decode(bytes, 1, 4);
  } catch (const CommError&) {
  }
  try {
    Admitted::decode(bytes);
  } catch (const CommError&) {
  }
}

std::vector<Bytes> message_seeds() {
  const Quorum::NextGroup next{
      .ranks = {1, 3}, .name = "name", .location = "a location", .joined = {"127.0.0.1 99 contact"}};
  const Admitted admitted{.rank = 2, .world = 4, .number = 1, .name = "name", .location = "a location"};
  return {bytes_of_text(next.encode()), bytes_of_text(admitted.encode())};
}

}  // namespace gradwire::fuzz
