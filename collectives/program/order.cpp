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

// Moves kernels from a list to the operations.
class Emitter {
 public:
  Emitter(const std::vector<EmittedKernel>& kernels, size_t exchanges) : last_for_(exchanges, -1) {
    for (const EmittedKernel& kernel : kernels) pending_.push_back(&kernel);
  }

  template <typename Chosen>
  void emit_kernels(Chosen chosen) {
    std::erase_if(pending_, [&](const EmittedKernel* kernel) {
      if (!chosen(*kernel)) return false;
      if (kernel->before >= 0) last_for_[kernel->before] = static_cast<int>(operations.size());
      operations.emplace_back(kernel->kernel);
      return true;
    });
  }

  void emit(Exchange exchange, size_t index) {
    if (const int last = last_for_[index]; last >= 0) std::get<Kernel>(operations[last]).needed = true;
    operations.emplace_back(std::move(exchange));
  }

  std::vector<Operation> operations;

 private:
  std::vector<const EmittedKernel*> pending_;
  std::vector<int> last_for_;  // [exchange]: the position of the last kernel that it depends on; -1: none
};

}  // namespace

// Every kernel that closes a chunk for exchange k precedes that exchange even without another dependency: the
// exchange may receive into a slot that the kernel reads.
std::vector<Operation> put_in_order(std::vector<EmittedKernel> kernels, std::vector<Exchange> exchanges) {
  for (size_t i = kernels.size(); i-- > 0;) {
    if (kernels[i].feeds_next) kernels[i].before = kernels[i + 1].before;
  }
  for (size_t k = 1; k < exchanges.size(); ++k) exchanges[k].early = !collide(exchanges[k - 1], exchanges[k]);
  Emitter emitter(kernels, exchanges.size());
  for (int k = 0; k < static_cast<int>(exchanges.size()); ++k) {
    const auto can_run_during = [k](const EmittedKernel& e) { return e.kernel.after < k; };
    emitter.emit_kernels([&](const EmittedKernel& e) { return e.before == k; });
    emitter.emit(std::move(exchanges[static_cast<size_t>(k)]), static_cast<size_t>(k));
    emitter.emit_kernels([&](const EmittedKernel& e) { return e.before == k + 1 && can_run_during(e); });
    emitter.emit_kernels([&](const EmittedKernel& e) { return e.before != k + 1 && can_run_during(e); });
  }
  emitter.emit_kernels([](const EmittedKernel&) { return true; });
  return std::move(emitter.operations);
}

}  // namespace gradwire
