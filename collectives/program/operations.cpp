#include "collectives/program/operations.h"

namespace gradwire {
namespace {

int64_t total_bytes(const std::vector<Transfer>& transfers, Transfer::Kind kind) {
  int64_t bytes = 0;
  for (const Transfer& t : transfers) bytes += t.kind == kind ? static_cast<int64_t>(t.bytes) : 0;
  return bytes;
}

}  // namespace

int64_t Exchange::bytes_sent() const {
  return total_bytes(transfers, Transfer::Kind::send);
}
int64_t Exchange::bytes_received() const {
  return total_bytes(transfers, Transfer::Kind::receive);
}

void Kernel::launch(const Stream& stream, Wire wire) const {
  if (const auto* encode = std::get_if<ReduceEncode>(&work)) {
    wire->reduce_encode(stream, *encode);
  } else if (const auto* decode = std::get_if<Decode>(&work)) {
    wire->decode(stream, *decode);
  } else {
    fp32_reduce(stream, std::get<Reduce>(work));
  }
}

}  // namespace gradwire
