#include <algorithm>

#include "collectives/program/compiler.h"

namespace gradwire {
namespace {

// Returns whether one transfer writes memory that the other reads or writes.
bool collide(const Transfer& a, const Transfer& b) {
  if (a.kind == Transfer::Kind::send && b.kind == Transfer::Kind::send) return false;
  const auto begin = [](const Transfer& t) { return reinterpret_cast<uintptr_t>(t.data); };
  return begin(a) < begin(b) + b.bytes && begin(b) < begin(a) + a.bytes;
}

bool collide(const Exchange& a, const Exchange& b) {
  return std::ranges::any_of(a.transfers, [&](const Transfer& x) {
    return std::ranges::any_of(b.transfers, [&](const Transfer& y) { return collide(x, y); });
  });
}

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

// Puts operations in order. Every kernel that closes a chunk for exchange k precedes exchange k even without
// another dependency, because the exchange may receive into a slot that the kernel reads.
std::vector<Operation> put_in_order(std::vector<EmittedKernel> kernels, std::vector<Exchange> exchanges) {
  for (size_t i = kernels.size(); i-- > 0;) {
    if (kernels[i].feeds_next) kernels[i].before = kernels[i + 1].before;
  }
  for (size_t k = 1; k < exchanges.size(); ++k) exchanges[k].early = !collide(exchanges[k - 1], exchanges[k]);
  std::vector<Operation> operations;
  // [exchange]: the position of the last kernel that the exchange depends on; -1: none.
  std::vector<int> last_for(exchanges.size(), -1);
  // Moves the chosen kernels to the operations.
  const auto emit = [&](auto chosen) {
    std::erase_if(kernels, [&](const EmittedKernel& kernel) {
      if (!chosen(kernel)) return false;
      if (kernel.before >= 0) last_for[kernel.before] = static_cast<int>(operations.size());
      operations.emplace_back(kernel.kernel);
      return true;
    });
  };
  for (int k = 0; k < static_cast<int>(exchanges.size()); ++k) {
    const auto can_run_during = [k](const EmittedKernel& e) { return e.kernel.after < k; };
    emit([&](const EmittedKernel& e) { return e.before == k; });
    if (last_for[k] >= 0) std::get<Kernel>(operations[last_for[k]]).needed = true;
    operations.emplace_back(std::move(exchanges[k]));
    // While this exchange is in flight, run kernels that do not depend on it.
    emit([&](const EmittedKernel& e) { return e.before == k + 1 && can_run_during(e); });
    emit([&](const EmittedKernel& e) { return e.before != k + 1 && can_run_during(e); });
  }
  emit([](const EmittedKernel&) { return true; });
  return operations;
}

}  // namespace gradwire
