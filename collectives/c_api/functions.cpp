// The functions of gradwire.h: each checks its arguments and handles, takes the lock, and forwards.
#include <limits>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "collectives/codec/codec.h"
#include "collectives/spec/spec.h"
#include "collectives/transport/transport.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/wire/registered.h"

namespace {

using namespace gradwire;
using namespace gradwire::c_api;

// A live reducer, locked for the duration of a call.
struct LockedReducer {
  explicit LockedReducer(gw_reducer handle) : reducer(reducers().get(handle)) {
    reducer->comm->check_caller();
    lock = std::unique_lock(reducer->comm->mutex);
  }
  ApiReducer* operator->() const { return reducer.get(); }
  std::shared_ptr<ApiReducer> reducer;
  std::unique_lock<std::mutex> lock;
};

// Returns a handle for the communicator, or null without a communicator.
gw_comm handle_of(std::unique_ptr<Communicator> made) {
  if (made == nullptr) return nullptr;
  return static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(made))));
}

}  // namespace

extern "C" {

gw_status gw_comm_create(const gw_comm_options* options, gw_comm* comm) {
  return guarded(__func__, [&] {
    require(comm != nullptr, "comm is null");
    require(options != nullptr, "options is null");
    *comm = handle_of(create(read_struct<gw_comm_options>(options, "gw_comm_options")));
  });
}

gw_status gw_comm_split(gw_comm comm, int color, int key, gw_comm* part) {
  return guarded(__func__, [&] {
    require(part != nullptr, "part is null");
    LockedComm locked(comm);
    const CancelledBy cancelled_by(&locked->aborted);
    *part = handle_of(locked->communicator->split(color, key));
  });
}

gw_status gw_comm_shrink(gw_comm comm, int64_t timeout_ms, const volatile int32_t* cancel, gw_comm* rest,
                         int32_t* ranks, int32_t capacity) {
  return guarded(__func__, [&] {
    require(rest != nullptr, "rest is null");
    const auto timeout = checked_timeout(timeout_ms);
    const CancelledBy cancelled_by(cancel);
    CancelledBy::refuse();
    LockedComm locked(comm);
    Communicator& group = *locked->communicator;
    require(ranks == nullptr || capacity >= group.world(), "capacity is {} in a world of {}", capacity,
            group.world());
    std::vector<int> survivors;
    *rest = handle_of(group.regroup(timeout, survivors));
    if (ranks == nullptr) return;
    std::copy_n(survivors.begin(), std::min(survivors.size(), static_cast<size_t>(capacity)), ranks);
  });
}

gw_status gw_comm_admit(gw_comm comm, int32_t most) {
  return guarded(__func__, [&] {
    require(most >= 0 && most <= kMaxRanks, "most is {}; it must be from 0 to {}", most, kMaxRanks);
    LockedComm locked(comm);
    Transport& transport = locked->communicator->transport();
    if (most == 0) {
      transport.close_admission();
      return;
    }
    transport.open_admission(most, [](const std::string& about) {
      return about == kAbout ? "" : fmt::format("the joiner runs {}, the group {}", about, kAbout);
    });
  });
}

gw_status gw_comm_grow(gw_comm comm, gw_comm* grown) {
  return guarded(__func__, [&] {
    require(grown != nullptr, "grown is null");
    LockedComm locked(comm);
    const CancelledBy cancelled_by(&locked->aborted);
    *grown = handle_of(locked->communicator->grow());
  });
}

gw_status gw_comm_query(gw_comm comm, gw_comm_info* info) {
  return guarded(__func__, [&] {
    require(info != nullptr, "info is null");
    LockedComm locked(comm);
    Communicator& group = *locked->communicator;
    const Device device = group.device();
    const Transport& transport = group.transport();
    const std::string invitation = transport.admits() ? transport.invitation() : "";
    const gw_comm_info found{.size = sizeof(gw_comm_info),
                             .rank = group.rank(),
                             .world = group.world(),
                             .device = device.is_host() ? GW_HOST : device.index,
                             .ranks_per_node = group.ranks_per_node(),
                             .bytes_sent = group.bytes_sent(),
                             .transport = group.transport().name(),
                             .invitation = invitation.empty() ? nullptr : locked->kept(invitation),
                             .joiners = transport.waiting_joiners()};
    write_struct(found, info, "gw_comm_info");
  });
}

gw_status gw_comm_check(gw_comm comm) {
  return guarded(__func__, [&] { LockedComm(comm)->communicator->check(); });
}

gw_status gw_comm_abort(gw_comm comm, const char* reason) {
  return guarded(__func__, [&] {
    auto object = comms().get(comm);
    object->check_process();
    // Do not lock: the holder of the lock may be waiting for the operation that is being aborted.
    object->abort(reason != nullptr && *reason != '\0' ? printable(reason) : "gw_comm_abort was called");
  });
}

gw_status gw_comm_destroy(gw_comm comm) {
  return guarded(__func__, [&] {
    if (comm == nullptr) return;
    comms().get(comm)->check_caller();
    comms().remove(comm);
  });
}

gw_status gw_reducer_create(gw_comm comm, const char* spec, const gw_tensor* tensors, int32_t n_tensors,
                            const gw_reducer_options* options, gw_reducer* reducer) {
  return guarded(__func__, [&] {
    LockedComm locked(comm);
    require(reducer != nullptr, "reducer is null");
    require(spec != nullptr, "spec is null; pass \"fp32\" for no compression");
    const CompressionSpec parsed = CompressionSpec::parse(spec);
    std::vector<void*> grads;
    auto read = read_tensors(tensors, n_tensors, &grads);
    std::string tag;
    ReducerOptions how = read_options(options, &tag);
    how.stream = locked->stream;
    agree_on_reducer(*locked.comm, parsed, read, how, tag);
    how.name = fmt::format("reducer {}{}", locked->next_reducer(), shown(tag));
    auto made = std::make_shared<ApiReducer>(locked.comm, parsed, std::move(read), how);
    made->set_addresses(grads);
    *reducer = static_cast<gw_reducer>(reducers().add(std::move(made)));
  });
}

gw_status gw_reducer_allreduce(gw_reducer reducer, void* const* grads, void* stream, gw_request* request) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    CallRequest call(locked->comm, request);
    locked->allreduce(grads, stream);
    call.start();
    locked->in_flight = call.get();
  });
}

gw_status gw_reducer_apply(gw_reducer reducer, void* const* grads, const gw_state* states,
                           const int32_t* step, void* stream) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    const bool empty = locked->tensors.empty();
    require((grads != nullptr && states != nullptr) || empty, "{} is null",
            grads == nullptr ? "grads" : "states");
    require(step != nullptr, "step is null");
    locked->apply(grads, states, step, stream);
  });
}

gw_status gw_orthonormalize(gw_comm comm, float* values, const int64_t* shapes, int32_t n, int32_t second,
                            uint64_t seed, int64_t step, int32_t* flags, void* stream) {
  return guarded(__func__, [&] {
    LockedComm locked(comm);
    require(n >= 0 && step >= 0, "n is {}, step {}; they must not be negative", n, step);
    if (n == 0) return;
    require(values != nullptr && shapes != nullptr && flags != nullptr, "values, shapes or flags is null");
    require(reinterpret_cast<uintptr_t>(values) % 16 == 0, "values is not aligned to 16 bytes");
    const Stream caller = locked->caller_stream(stream);
    std::vector<int64_t> key(shapes, shapes + int64_t{3} * n);
    key.push_back(second != 0 ? 1 : 0);
    auto found = locked->orthonormalizations.find(key);
    if (found == locked->orthonormalizations.end()) {
      std::vector<MatrixDescriptor> factors;
      int64_t end = 0;
      for (const int64_t* shape = shapes; shape != shapes + int64_t{3} * n; shape += 3) {
        constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
        require(0 < shape[1] && shape[1] <= shape[0] && shape[0] <= kMax && 0 <= shape[2] && shape[2] <= kMax,
                "factor {} is {} x {} with number {}", factors.size(), shape[0], shape[1], shape[2]);
        const auto rows = static_cast<int32_t>(shape[0]), rank = static_cast<int32_t>(shape[1]);
        factors.push_back({.p_offset = end,
                           .q_offset = end,
                           .rows = second != 0 ? rank : rows,
                           .cols = second != 0 ? rows : rank,
                           .rank = rank,
                           .seed_id = static_cast<int32_t>(shape[2])});
        end += (shape[0] * shape[1] + 3) / 4 * 4;
      }
      const Device device = caller.device();
      ApiComm::Orthonormalization made{.table = MatrixTable(caller, std::move(factors)),
                                       .step = make_buffer<uint64_t>(device, 1),
                                       .host_step = Buffer::pinned(device, sizeof(uint64_t)),
                                       .done = Event::create(device)};
      made.scratch = make_buffer<double>(device, made.table.scratch_doubles());
      found = locked->orthonormalizations.emplace(std::move(key), std::move(made)).first;
    }
    ApiComm::Orthonormalization& memory = found->second;
    memory.done.synchronize();
    *memory.host_step.as<uint64_t>() = static_cast<uint64_t>(step);
    copy(caller, memory.step.data(), memory.host_step.data(), sizeof(uint64_t));
    orthonormalize(caller, {.table = &memory.table,
                            .which = second != 0 ? Factor::q : Factor::p,
                            .in = values,
                            .out = values,
                            .flags = flags,
                            .keep_flags = true,
                            .seed = seed,
                            .step = memory.step.as<const uint64_t>(),
                            .scratch = memory.scratch.as<double>()});
    memory.done.record(caller);
    if (caller.device().is_host()) caller.synchronize();
  });
}

gw_status gw_spec_query(const char* spec, int64_t rows, int64_t cols, gw_spec_info* info) {
  return guarded(__func__, [&] {
    require(spec != nullptr && info != nullptr, "spec or info is null");
    require(rows >= 0 && cols >= 0, "rows {}, cols {}", rows, cols);
    using Method = CompressionSpec::Method;
    const CompressionSpec parsed = CompressionSpec::parse(spec, false);
    CompressionSpec message = CompressionSpec::parse(parsed.wire->spec(), false);
    message.rounding = parsed.rounding;
    message.schedule = parsed.schedule;
    message.fp32_intra_node = parsed.fp32_intra_node;
    static thread_local std::string wire;
    wire = message.to_string();
    const bool factors = parsed.method == Method::powersgd || parsed.method == Method::dion;
    constexpr const char* kCodecs[] = {nullptr, "powersgd", "randk", "dion"};  // by Method
    const char* const codec = kCodecs[static_cast<size_t>(parsed.method)];
    write_struct({.size = sizeof(gw_spec_info),
                  .method = codec != nullptr ? codec : parsed.wire->name,
                  .wire = wire.c_str(),
                  .bits = 8 * parsed.wire->bytes_per_value(),
                  .exact = parsed.wire->exact ? 1 : 0,
                  .small = is_small(rows, cols) ? 1 : 0,
                  .rank = factors ? powersgd_rank(parsed, rows, cols) : 0,
                  .alternate = parsed.alternate ? 1 : 0,
                  .start = parsed.policy.start,
                  .seed = parsed.seed},
                 info, "gw_spec_info");
  });
}

gw_status gw_reducer_ready(gw_reducer reducer, int32_t tensor, void* stream) {
  return guarded(__func__, [&] { LockedReducer(reducer)->ready(tensor, stream); });
}

gw_status gw_reducer_wait(gw_reducer reducer, void* stream, gw_request* request) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    CallRequest call(locked->comm, request);
    locked->wait(stream);
    call.start();
    locked->in_flight = call.get();
  });
}

gw_status gw_reducer_shards(gw_reducer reducer, gw_range* ranges, int32_t capacity, int32_t* count) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(count != nullptr, "count is null");
    require(capacity >= 0 && (ranges != nullptr || capacity == 0),
            "ranges is null, or capacity {} is negative", capacity);
    const Reducer& inner = locked->reducer;
    std::vector<gw_range> all;
    for (const ElementRange& owned : inner.owned()) {
      for (int i = 0; i < inner.tensors(); ++i) {
        const int64_t at = inner.offset(i), last = at + locked->tensors[static_cast<size_t>(i)].count();
        const int64_t begin = std::max(owned.begin, at), end = std::min(owned.end, last);
        if (begin < end) all.push_back({.tensor = i, .begin = begin - at, .end = end - at});
      }
    }
    std::copy_n(all.begin(), std::min(all.size(), static_cast<size_t>(capacity)), ranges);
    *count = static_cast<int32_t>(all.size());
  });
}

gw_status gw_reducer_stats(gw_reducer reducer, gw_stats* stats) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(stats != nullptr, "stats is null");
    write_struct(locked->stats(), stats, "gw_stats");
  });
}

gw_status gw_reducer_state_save(gw_reducer reducer, void* state, size_t capacity, size_t* bytes) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(bytes != nullptr, "bytes is null");
    require(state != nullptr || capacity == 0, "state is null, and capacity is {}", capacity);
    *bytes = locked->save_state(state, capacity);
  });
}

gw_status gw_reducer_state_load(gw_reducer reducer, const void* state, size_t size) {
  return guarded(__func__, [&] { LockedReducer(reducer)->load_state(state, size); });
}

gw_status gw_reducer_state_load_ranks(gw_reducer reducer, const void* const* states, const size_t* sizes,
                                      int32_t n) {
  return guarded(__func__, [&] { LockedReducer(reducer)->load_states(states, sizes, n); });
}

gw_status gw_reducer_destroy(gw_reducer reducer) {
  return guarded(__func__, [&] {
    if (reducer == nullptr) return;
    reducers().get(reducer)->comm->check_caller();
    reducers().remove(reducer);
  });
}

}  // extern "C"
// gw_format_register(): wire formats of the calling program.

extern "C" gw_status gw_format_register(const gw_format* format) {
  using namespace gradwire;
  return c_api::guarded(__func__, [&] {
    require(format != nullptr, "format is null");
    const auto f = c_api::read_struct<gw_format>(format, "gw_format");
    require(f.name != nullptr, "gw_format.name is null");
    const std::string name = f.name;
    require(!CompressionSpec::is_codec(name),
            "wire format '{0}': specs know a codec as {0}; choose another name", name);
    require(f.encode != nullptr, "wire format '{}': encode is null", name);
    require(f.decode != nullptr, "wire format '{}': decode is null", name);
    register_wire_format(name, f.block, f.bytes, {.encode = f.encode, .decode = f.decode, .user = f.user});
  });
}
