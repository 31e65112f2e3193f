// The collectives of gradwire.h on the caller's memory. The functions check their arguments and run programs.
// Programs are built at first use and cached.

#include <fmt/format.h>

#include <limits>
#include <numeric>

#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "collectives/codec/codec.h"
#include "collectives/codec/residual.h"
#include "collectives/plan/planner.h"
#include "kernels/wire/floats.h"
#include "runtime/util/hash.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kShardsShown = 8;

size_t bytes_of(gw_dtype dtype) {
  return static_cast<size_t>(gradwire::bytes_of(checked_dtype(dtype)));
}

int64_t elements_before(const Shards& shards, int rank) {
  return std::accumulate(shards.begin(), shards.begin() + rank, int64_t{0});
}

// Returns the shards' sizes for error texts, such as "3, 0, 5". A long list is cut and gets a digest.
std::string listed(const Shards& shards) {
  if (shards.size() <= kShardsShown) return fmt::format("{}", fmt::join(shards, ", "));
  uint64_t digest = 0;
  for (int64_t shard : shards) digest = mix(digest, static_cast<uint64_t>(shard));
  return fmt::format("{}, ... #{:08x}", fmt::join(shards.begin(), shards.begin() + kShardsShown, ", "),
                     digest >> 32);
}

std::string describe(const CollectiveCall& call) {
  const char* dtype = long_name(checked_dtype(call.dtype));
  const char* op = call.op == GW_AVG ? "mean" : "sum";
  const std::string what = call.function + shown(call.tag);
  switch (call.collective) {
    case Collective::allreduce:
      return fmt::format("{}, {} of {}", what, op, dtype);
    case Collective::reduce_scatter:
      return fmt::format("{}, {} of {}, shards {}", what, op, dtype, listed(call.shards));
    case Collective::all_gather:
      return fmt::format("{} of {}, shards {}", what, dtype, listed(call.shards));
    case Collective::broadcast:
      return fmt::format("{} of {} from rank {}", what, dtype, call.root);
  }
  return what;
}

void check_memory(const char* what, const void* memory, int64_t count, size_t element) {
  require(memory != nullptr || count == 0, "{} is null", what);
  require(reinterpret_cast<uintptr_t>(memory) % element == 0, "{} is not aligned to its elements of {} bytes",
          what, element);
}

// Throws BadInput if the shard overlaps the whole buffer, unless the shard is exactly at its place in the
// whole buffer.
void check_place(const char* shard_name, const void* shard, const char* whole_name, const void* whole,
                 const Shards& shards, int rank, size_t element) {
  const auto at = reinterpret_cast<uintptr_t>(shard), begin = reinterpret_cast<uintptr_t>(whole);
  const size_t size = static_cast<size_t>(shards[rank]) * element;
  const size_t all = static_cast<size_t>(elements_before(shards, static_cast<int>(shards.size()))) * element;
  if (size == 0 || at + size <= begin || begin + all <= at) return;
  require(at == begin + static_cast<size_t>(elements_before(shards, rank)) * element,
          "{0} overlaps {1}, but is not this rank's place in it; pass {1} + the elements of lower ranks, or "
          "other memory",
          shard_name, whole_name);
}

// Copies the number of elements of each rank's shard into the call.
void set_shards(CollectiveCall& call, int world, const int64_t* counts) {
  require(counts != nullptr, "counts is null; pass the elements of each rank's shard");
  call.shards.assign(counts, counts + world);
  int64_t left = std::numeric_limits<int64_t>::max() / 8;
  for (size_t r = 0; r < call.shards.size(); ++r) {
    require(call.shards[r] >= 0, "counts[{}] is {}, must not be negative", r, call.shards[r]);
    require(call.shards[r] <= left, "counts add up to more elements than there is memory");
    left -= call.shards[r];
    call.count += call.shards[r];
  }
}

// Checks the arguments of a collective and runs it. `prepare` receives the call and the communicator. It adds
// the number of elements to the call, and checks the memory.
template <typename Prepare>
gw_status run_collective(const char* function, Collective collective, gw_comm comm, const void* in, void* out,
                         gw_dtype dtype, gw_op op, const char* spec, void* stream,
                         const gw_call_options* options, const Prepare& prepare,
                         void (ApiComm::*run)(const CollectiveCall&, void*) = &ApiComm::run) {
  return guarded(function, [&] {
    LockedComm locked(comm);
    const auto given =
        options == nullptr ? gw_call_options{} : read_struct<gw_call_options>(options, "gw_call_options");
    const std::string tag = checked_tag(given.tag);
    CallRequest request(locked.comm, given.request);
    float* const residual = given.residual;
    const bool has_residual = collective != Collective::broadcast && run == &ApiComm::run;
    require(has_residual || residual == nullptr, "gw_call_options.residual is set, but {} has no residual",
            function);
    checked_dtype(dtype);
    require(op == GW_SUM || op == GW_AVG, "op {} is neither GW_SUM nor GW_AVG", op);
    require(spec != nullptr, "spec is null; pass \"fp32\" for no compression");
    require(reinterpret_cast<uintptr_t>(residual) % alignof(float) == 0,
            "residual is not aligned to its elements of 4 bytes");
    CollectiveCall call{.function = function,
                        .collective = collective,
                        .in = in,
                        .out = out,
                        .residual = residual,
                        .dtype = dtype,
                        .op = op,
                        .spec = spec,
                        .tag = tag};
    prepare(call, *locked->communicator);
    (*locked.comm.*run)(call, stream);
    request.start();
  });
}

}  // namespace

const CompressionSpec& ApiComm::parsed(const std::string& spec) {
  const auto found = specs_.find(spec);
  return found != specs_.end() ? found->second
                               : specs_.emplace(spec, CompressionSpec::parse(spec, false)).first->second;
}

Program& ApiComm::program_for(const CollectiveCall& call) {
  // Build one program per address if a change of address must not block the host: with a request, and on a
  // GPU, where allocators reuse a few addresses.
  const bool by_address =
      call.collective == Collective::allreduce || request != nullptr || communicator->device().is_cuda();
  const Key key{call.function, by_address ? call.out : nullptr,
                call.count,    call.shards,
                call.dtype,    call.op,
                call.root,     call.spec,
                call.tag};
  if (auto* entry = programs_.find(key)) {
    Program& program = *entry->program;
    const ProgramBuffers& at = program.buffers();
    const bool moved = at.in != call.in || at.out != call.out;
    if (moved || at.residual != call.residual) stream.synchronize();  // work of this program may be in flight
    if (moved) program.rebind(call.in, call.out);
    if (at.residual != call.residual) program.rebind_residual(call.residual);
    return program;
  }
  const CompressionSpec& spec = parsed(call.spec);
  require(!spec.needs_reducer(),
          "spec '{}' needs steps or tensors, which {} does not have; use a reducer, or a wire format such as "
          "fp32, bf16, fp8 or int8",
          call.spec, call.function);
  const int world = communicator->world();
  const SchedulePlanner plan(spec, call.collective, world, communicator->ranks_per_node(),
                             communicator->link_costs(stream, spec.schedule), kAutomaticSlices, call.root);
  const SchedulePlanner::Choice choice = plan.choose(call.count, spec.wire, call.shards);
  const bool mean = call.op == GW_AVG;
  auto program = std::make_unique<Program>(
      communicator->transport(), choice.schedule,
      ProgramBuffers{.in = call.in,
                     .out = call.out,
                     .residual = call.residual,
                     .count = call.count,
                     .dtype = checked_dtype(call.dtype),
                     .shards = call.shards},
      Program::Options{.what = describe(call),
                       .wire = spec.wire,
                       .fp32_intra_node = spec.fp32_intra_node,
                       .scale = mean ? 1.0f / static_cast<float>(world) : 1.0f,
                       .rounding = {spec.rounding, static_cast<uint64_t>(communicator->rank()) + 1,
                                    step_.as<const uint64_t>(), 0},
                       .spec = spec.to_string(),
                       .transfers = communicator->transfers(),
                       .slice_bytes = choice.slice_bytes});
  stream.synchronize();  // add() may free or rebind memory, so no work may be in flight
  return *programs_.add({.key = key, .residual = {}, .program = std::move(program)}).program;
}

void ApiComm::between(void* native_stream, const std::function<void()>& work) {
  const Stream caller = caller_stream(native_stream);
  start_.record(caller);
  stream.wait(start_);
  wait_or_notify(work);
  done_.record(stream);
  wait_or_notify([&] { caller.wait(done_); });
}

// Error feedback is there if the caller has given a residual, whatever the spec says.
void ApiComm::run(const CollectiveCall& call, void* native_stream) {
  if (call.residual != nullptr) {
    const std::string why = parsed(call.spec).divergence();
    require(why.empty(), "spec '{}' with a residual: {}or no residual", call.spec, why);
  }
  caller_stream(native_stream);  // rejects an invalid stream before any program is built
  Program& program = program_for(call);
  if (communicator->world() == 1) {
    if (call.in == call.out) return;
    const size_t bytes = static_cast<size_t>(call.count) * bytes_of(call.dtype);
    between(native_stream, [&] { copy(stream, call.out, call.in, bytes); });
    return;
  }
  const double decay = parsed(call.spec).policy.decay;
  between(native_stream, [&] {
    if (decay != 1 && call.residual != nullptr) {
      const bool of_shard = call.collective == Collective::all_gather;
      decay_residual(stream, call.residual,
                     of_shard ? call.shards[static_cast<size_t>(communicator->rank())] : call.count,
                     static_cast<float>(decay));
    }
    program.run(stream);
    increment(stream, step_.as<uint64_t>());
  });
}

// Sends the difference between masters and replicas. All replicas have the same bits, so the owner subtracts
// its replica. The error of an encode is part of the next difference. So replicas drift neither from the
// masters nor from each other.
void ApiComm::run_update(const CollectiveCall& call, void* native_stream) {
  CompressionSpec spec = parsed(call.spec);
  spec.policy.decay = 1;  // nothing decays the difference
  const std::string why = spec.divergence();
  require(why.empty(), "spec '{}': replicas would drift from their masters: {}or another format", call.spec,
          why);
  if (spec.wire->exact || communicator->world() == 1) {
    return run(call, native_stream);  // an exact format gathers the masters, not the differences
  }
  caller_stream(native_stream);
  const size_t bytes = static_cast<size_t>(call.count) * sizeof(float);
  if (difference_.bytes() < bytes) {
    stream.synchronize();
    difference_ = Buffer(communicator->device(), bytes);
  }
  const int rank = communicator->rank();
  const int64_t before = elements_before(call.shards, rank);
  auto* const replica = static_cast<float*>(call.out);
  float* const difference = difference_.as<float>();
  CollectiveCall gather = call;
  gather.in = difference + before;
  gather.out = difference;
  Program& program = program_for(gather);
  between(native_stream, [&] {
    Reduce negate{
        .own = replica + before, .out = difference + before, .scale = -1.0f, .count = call.shards[rank]};
    fp32_reduce(stream, negate);
    Reduce subtract{.inputs = {difference + before},
                    .num_inputs = 1,
                    .own = static_cast<const float*>(call.in),
                    .out = difference + before,
                    .count = call.shards[rank]};
    fp32_reduce(stream, subtract);
    program.run(stream);
    Reduce add{.inputs = {difference}, .num_inputs = 1, .own = replica, .out = replica, .count = call.count};
    fp32_reduce(stream, add);
    increment(stream, step_.as<uint64_t>());
  });
}

}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

gw_status gw_allreduce(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, gw_op op, const char* spec,
                       void* stream, const gw_call_options* options) {
  return run_collective(__func__, Collective::allreduce, comm, buf, buf, dtype, op, spec, stream, options,
                        [&](CollectiveCall& call, const Communicator&) {
                          require(count >= 0, "count is {}, must not be negative", count);
                          call.count = count;
                          check_memory("buf", buf, count, bytes_of(dtype));
                        });
}

gw_status gw_reduce_scatter(gw_comm comm, const void* in, void* out, const int64_t* counts, gw_dtype dtype,
                            gw_op op, const char* spec, void* stream, const gw_call_options* options) {
  return run_collective(__func__, Collective::reduce_scatter, comm, in, out, dtype, op, spec, stream, options,
                        [&](CollectiveCall& call, const Communicator& group) {
                          set_shards(call, group.world(), counts);
                          check_memory("in", in, call.count, bytes_of(dtype));
                          check_memory("out", out, call.shards[group.rank()], bytes_of(dtype));
                          check_place("out", out, "in", in, call.shards, group.rank(), bytes_of(dtype));
                        });
}

gw_status gw_all_gather(gw_comm comm, const void* in, void* out, const int64_t* counts, gw_dtype dtype,
                        const char* spec, void* stream, const gw_call_options* options) {
  return run_collective(__func__, Collective::all_gather, comm, in, out, dtype, GW_SUM, spec, stream, options,
                        [&](CollectiveCall& call, const Communicator& group) {
                          set_shards(call, group.world(), counts);
                          check_memory("in", in, call.shards[group.rank()], bytes_of(dtype));
                          check_memory("out", out, call.count, bytes_of(dtype));
                          check_place("in", in, "out", out, call.shards, group.rank(), bytes_of(dtype));
                        });
}

gw_status gw_all_gather_update(gw_comm comm, const float* master, void* replica, const int64_t* counts,
                               gw_dtype dtype, const char* spec, void* stream,
                               const gw_call_options* options) {
  const auto prepare = [&](CollectiveCall& call, const Communicator& group) {
    set_shards(call, group.world(), counts);
    require<Unsupported>(dtype == GW_FLOAT32,
                         "replicas in {} would round every update; keep them in float32, or use "
                         "gw_all_gather with spec bf16",
                         long_name(checked_dtype(dtype)));
    const int64_t shard = call.shards[group.rank()];
    check_memory("master", master, shard, sizeof(float));
    check_memory("replica", replica, call.count, sizeof(float));
    const auto at = reinterpret_cast<uintptr_t>(master), begin = reinterpret_cast<uintptr_t>(replica);
    const auto bytes = [](int64_t elements) { return static_cast<size_t>(elements) * sizeof(float); };
    require(at + bytes(shard) <= begin || begin + bytes(call.count) <= at || shard == 0,
            "master overlaps replica; pass separate memory, because masters hold what replicas have not "
            "received");
  };
  return run_collective(__func__, Collective::all_gather, comm, master, replica, dtype, GW_SUM, spec, stream,
                        options, prepare, &ApiComm::run_update);
}

gw_status gw_broadcast(gw_comm comm, void* buf, int64_t count, gw_dtype dtype, int root, const char* spec,
                       void* stream, const gw_call_options* options) {
  return run_collective(__func__, Collective::broadcast, comm, buf, buf, dtype, GW_SUM, spec, stream, options,
                        [&](CollectiveCall& call, const Communicator& group) {
                          require(root >= 0 && root < group.world(), "root is {} in a world of {}", root,
                                  group.world());
                          call.root = root;
                          require(count >= 0, "count is {}, must not be negative", count);
                          call.count = count;
                          check_memory("buf", buf, count, bytes_of(dtype));
                        });
}

}  // extern "C"
