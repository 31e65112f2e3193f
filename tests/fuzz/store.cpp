#include "collectives/net/store.h"

#include <stdexcept>
#include <string>

#include "collectives/net/socket.h"
#include "runtime/util/error.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

template <typename Parse>
void try_parse(Parse parse) {
  try {
    parse();
  } catch (const CommError&) {  // not a message of this kind
  }
}

}  // namespace

// Decodes a stream of frames. Checks that a decoded frame encodes to the same bytes.
void store(Input input) {
  const std::string all(reinterpret_cast<const char*>(input.data()), input.size());
  std::string bytes = all, again;
  try_parse([&] {
    while (auto frame = Frame::decode(bytes)) {
      again += frame->encode();
      try_parse([&] {
        const RollCall roll = RollCall::decode(frame->value);
        roll.absent();
        RollCall::decode(roll.encode());
      });
      try_parse([&] { StoreHello::decode(frame->value); });
    }
  });
  if (all.compare(0, again.size(), again) != 0) throw std::logic_error("frames that change when sent on");
}

std::vector<Bytes> store_seeds() {
  RollCall roll;
  roll.ranks = {{RollCall::Presence::here, "in step 7"},
                {RollCall::Presence::silent, ""},
                {RollCall::Presence::gone, "at home"}};
  std::string frames = Frame{Frame::Op::hello, 0, "watch", StoreHello{1, 4, "a job"}.encode()}.encode();
  frames += Frame{Frame::Op::set, 1, "address 1", "127.0.0.1:99"}.encode();
  frames += Frame{Frame::Op::ok, 2, "", roll.encode()}.encode();
  return {bytes_of_text(frames)};
}

}  // namespace gradwire::fuzz
