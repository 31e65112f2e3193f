#include "collectives/net/store.h"

#include <stdexcept>
#include <string>

#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {

// Decodes a stream of frames. A decoded frame encodes to the same bytes.
void store(Input input) {
  const std::string all(reinterpret_cast<const char*>(input.data()), input.size());
  std::string bytes = all, again;
  try {
    while (auto message = StoreMessage::decode(bytes)) {
      again += message->encode();
      const RollCall roll = RollCall::decode(message->value);
      roll.absent();
      RollCall::decode(roll.encode());
    }
  } catch (const CommError&) {  // not a frame
  }
  if (all.compare(0, again.size(), again) != 0) throw std::logic_error("frames that change when sent on");
}

std::vector<Bytes> store_seeds() {
  std::string frames = StoreMessage{StoreMessage::Op::hello, 0, "watch", "token 1 4"}.encode();
  frames += StoreMessage{StoreMessage::Op::set, 1, "address 1", "127.0.0.1:99"}.encode();
  frames += StoreMessage{StoreMessage::Op::ok, 2, "", "hin step 7\ns\ngat home\n"}.encode();
  return {bytes_of_text(frames)};
}

}  // namespace gradwire::fuzz
