// Barriers, shuffles and votes. Threads wait for the last thread, which computes the results of all threads.
#include <fmt/format.h>

#include <cstring>

#include "tests/simt/engine.h"

namespace gradwire::simt {
namespace {

bool same_place(const Where& a, const Where& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

uint64_t reduce(Op op, uint64_t a, uint64_t b) {
  auto sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b);
  auto ua = static_cast<uint32_t>(a), ub = static_cast<uint32_t>(b);
  switch (op) {
    case Op::add_signed:
    case Op::add_unsigned:
      return ua + ub;
    case Op::min_signed:
      return static_cast<uint32_t>(sa < sb ? sa : sb);
    case Op::max_signed:
      return static_cast<uint32_t>(sa > sb ? sa : sb);
    case Op::min_unsigned:
      return ua < ub ? ua : ub;
    case Op::max_unsigned:
      return ua > ub ? ua : ub;
    case Op::bit_and:
      return ua & ub;
    case Op::bit_or:
      return ua | ub;
    case Op::bit_xor:
      return ua ^ ub;
    default:
      return 0;
  }
}

// Sets the results of all lanes once every lane of `mask` has reached `op`. `lanes` are the warp's threads.
void finish(Op op, unsigned mask, Thread* lanes) {
  unsigned votes = 0;
  bool first = true;
  uint64_t total = 0;
  bool reads_all = op != Op::shuffle4 && op != Op::shuffle8 && op != Op::sync_warp;
  for (unsigned rest = reads_all ? mask : 0; rest != 0; rest &= rest - 1) {
    int i = std::countr_zero(rest);
    if (lanes[i].value != 0) votes |= 1u << i;
    total = first ? lanes[i].value : reduce(op, total, lanes[i].value);
    first = false;
  }
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    Thread& t = lanes[std::countr_zero(rest)];
    unsigned equal = 0;
    switch (op) {
      case Op::sync_warp:
        break;
      case Op::shuffle4:
      case Op::shuffle8:
        // Reading a lane outside the mask gives an undefined value. Some kernels ignore that value, so it is
        // poison instead of a failure.
        t.result = mask >> t.source & 1u ? lanes[t.source].value : block.random.next() | 0xffu << 23;
        break;
      case Op::ballot:
        t.result = votes;
        break;
      case Op::any:
        t.result = votes != 0;
        break;
      case Op::all:
        t.result = votes == mask;
        break;
      case Op::match_any:
      case Op::match_all:
        for (unsigned other = mask; other != 0; other &= other - 1) {
          int i = std::countr_zero(other);
          if (lanes[i].value == t.value) equal |= 1u << i;
        }
        t.result = op == Op::match_any ? equal : equal == mask ? mask : 0;
        break;
      default:
        t.result = total;
    }
  }
}

// Fails with a message about a mask that excludes the calling lane. Not inlined, because its strings would
// enlarge every waiting thread's stack frame.
[[noreturn, gnu::noinline]] void refuse_mask(Op op, unsigned mask, const Where& where) {
  const std::string call = fmt::format("thread {} calls {} ({}:{}) with mask {:#010x}", block.current,
                                       op_name(op), where.file, where.line, mask);
  if (!(mask & current_bit())) fail(fmt::format("{}, which leaves out the caller, lane {}", call, lane_id()));
  fail(fmt::format("{}, but its warp has only the lanes {:#010x}", call, current_warp().existing));
}

}  // namespace

const char* op_name(Op op) {
  static const char* const names[] = {"__syncwarp",
                                      "__shfl_sync (4 bytes)",
                                      "__shfl_sync (8 bytes)",
                                      "__ballot_sync",
                                      "__any_sync",
                                      "__all_sync",
                                      "__match_any_sync",
                                      "__match_all_sync",
                                      "__reduce_add_sync",
                                      "__reduce_add_sync",
                                      "__reduce_min_sync",
                                      "__reduce_min_sync",
                                      "__reduce_max_sync",
                                      "__reduce_max_sync",
                                      "__reduce_and_sync",
                                      "__reduce_or_sync",
                                      "__reduce_xor_sync",
                                      "__syncthreads",
                                      "__syncthreads_and",
                                      "__syncthreads_or",
                                      "__syncthreads_count"};
  return names[static_cast<size_t>(op)];
}

uint64_t warp_collective(Op op, unsigned mask, uint64_t value, int source, Where where) {
  Warp& warp = current_warp();
  Thread& self = current_thread();
  unsigned bit = current_bit();
  if (!(mask & bit) || (mask & ~warp.existing)) refuse_mask(op, mask, where);
  self.state = Thread::State::in_warp_op;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.source = source;
  self.where = where;
  warp.in_warp_op |= bit;

  auto index = static_cast<size_t>(block.current / kWarp);
  Thread* lanes = &block.threads[index * kWarp];
  bool complete = (warp.in_warp_op & mask) == mask;
  for (unsigned rest = mask; complete && rest != 0; rest &= rest - 1) {
    const Thread& t = lanes[std::countr_zero(rest)];
    complete = t.op == op && t.mask == mask && same_place(t.where, where);
  }
  if (complete) {
    finish(op, mask, lanes);
    for (unsigned rest = mask; rest != 0; rest &= rest - 1)
      lanes[std::countr_zero(rest)].state = Thread::State::ready;
    warp.in_warp_op &= ~mask;
    make_ready(index, mask & ~bit);
    block.spins = 0;
  } else {
    switch_out();
  }
  return self.result;
}

int block_collective(Op op, bool predicate, Where where) {
  Thread& self = current_thread();
  self.state = Thread::State::in_block_op;
  self.op = op;
  self.where = where;
  block.predicates += predicate;
  auto count = static_cast<int>(block.threads.size());
  if (++block.at_barrier < count) {
    switch_out();
    return static_cast<int>(self.result);
  }
  for (const Thread& t : block.threads) {
    if (t.op != op || !same_place(t.where, where)) {
      fail("divergent barrier: threads of the block wait at different barriers" + describe_threads());
    }
  }
  int result = op == Op::sync_block_and  ? block.predicates == count
               : op == Op::sync_block_or ? block.predicates > 0
                                         : block.predicates;
  for (Thread& t : block.threads) t.state = Thread::State::ready, t.result = static_cast<uint64_t>(result);
  block.at_barrier = block.predicates = 0;
  block.spins = 0;
  for (size_t w = 0; w < block.warps.size(); ++w) make_ready(w, block.warps[w].existing);
  // This thread continues, so the scheduler must not draw this thread again.
  Warp& warp = current_warp();
  warp.ready &= ~current_bit();
  if (warp.ready == 0) block.ready_warps &= ~(1u << (block.current / kWarp));
  return result;
}

int lane_id() {
  return block.current % kWarp;
}

AsyncCopies& async_copies() {
  return current_thread().copies;
}

unsigned lanes_alive() {
  auto warp = static_cast<size_t>(block.current / kWarp);
  unsigned alive = 0;
  for (size_t i = warp * kWarp; i < block.threads.size() && i < (warp + 1) * kWarp; ++i) {
    if (block.threads[i].state != Thread::State::exited) alive |= 1u << (i % kWarp);
  }
  return alive;
}

}  // namespace gradwire::simt
