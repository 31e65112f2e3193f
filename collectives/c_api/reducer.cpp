#include "collectives/c_api/reducer.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "collectives/agreement/statements.h"
#include "collectives/c_api/errors.h"
#include "collectives/reducer/choose.h"
#include "kernels/simd/vector.h"

namespace gradwire::c_api {
namespace {

// Limit on a tensor's number of elements, so that sizes in bytes fit in 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 50;

void check_alignment(const GradientTensor& tensor, const void* gradient) {
  const auto bytes = static_cast<uintptr_t>(bytes_of(tensor.dtype));
  require(reinterpret_cast<uintptr_t>(gradient) % bytes == 0,
          "the gradient of '{}' is not aligned to its elements of {} bytes", tensor.name, bytes);
}

}  // namespace

Handles<ApiReducer>& reducers() {
  static auto* handles = new Handles<ApiReducer>(2, "reducer");
  return *handles;
}

std::vector<GradientTensor> read_tensors(const gw_tensor* tensors, int32_t n, std::vector<void*>* grads) {
  require(n >= 0, "n_tensors is {}, must not be negative", n);
  require(tensors != nullptr || n == 0, "tensors is null");
  std::vector<GradientTensor> result;
  std::set<std::string> names;
  int64_t total = 0;
  for (int32_t i = 0; i < n; ++i) {
    // The caller's header determines the spacing of the elements.
    const size_t stride = i == 0 ? 0 : tensors[0].size;
    const void* at = reinterpret_cast<const char*>(tensors) + static_cast<size_t>(i) * stride;
    const auto t = read_struct<gw_tensor>(at, "gw_tensor");
    std::string name = t.name != nullptr ? t.name : fmt::format("tensor {}", i);
    check_text(name, fmt::format("the name of tensor {}", i));
    const std::string who = fmt::format("tensor {} ('{}')", i, name);
    require(t.size == tensors[0].size, "{}: its size differs from that of tensor 0", who);
    require(names.insert(name).second, "{}: another tensor has the same name", who);
    require(t.rows >= 0 && t.cols >= 0, "{}: rows {}, cols {}", who, t.rows, t.cols);
    require(t.cols == 0 || t.rows <= (kMaxElements - total) / t.cols, "{}: too many elements", who);
    total += t.rows * t.cols;
    GradientTensor tensor{std::move(name), {t.rows}, checked_dtype(t.dtype, who + ": ")};
    check_alignment(tensor, t.grad);
    if (t.cols != 1) tensor.shape.push_back(t.cols);
    result.push_back(std::move(tensor));
    grads->push_back(t.grad);
  }
  return result;
}

ReducerOptions read_options(const gw_reducer_options* given, std::string* tag) {
  ReducerOptions options;
  options.alignment = 1;  // frameworks pack their buckets without gaps
  options.own_gradients = false;
  if (given == nullptr) return options;
  const auto o =
      read_struct<gw_reducer_options>(given, "gw_reducer_options", offsetof(gw_reducer_options, shard));
  require(o.bucket_bytes >= 0, "gw_reducer_options.bucket_bytes is {}, must not be negative", o.bucket_bytes);
  if (o.bucket_bytes > 0) options.bucket_bytes = o.bucket_bytes;
  options.average = o.sum == 0;
  options.timing = o.no_timing == 0;
  options.seed = o.seed;
  options.sharded = o.shard != 0;
  options.skip_unused = o.skip_unused != 0;
  *tag = checked_tag(o.tag);
  return options;
}

std::vector<std::string> reducer_statements(const ApiComm& comm, const std::vector<CompressionSpec>& specs,
                                            const std::vector<GradientTensor>& tensors, int64_t bucket_bytes,
                                            uint64_t seed, const std::vector<std::string>& others) {
  const Communicator& group = *comm.communicator;
  std::vector<std::string> statements;
  bool factors = false;
  for (const CompressionSpec& spec : specs) {
    statements.push_back("spec " + spec.to_string());
    statements.push_back("wire " + spec.wire->identity());
    using Method = CompressionSpec::Method;
    factors = factors || spec.method == Method::powersgd || spec.method == Method::dion;
  }
  statements.push_back(fmt::format("bucket_bytes {}", bucket_bytes));
  statements.push_back(fmt::format("seed {}", seed));
  statements.push_back(fmt::format("ranks_per_node {}", group.ranks_per_node()));
  // Each rank orthonormalizes and multiplies the same factors, so all ranks must use the same loops.
  if (factors && group.device().is_host()) {
    statements.push_back(fmt::format("loops for {}, of Gradwire {}", simd_level(), GRADWIRE_VERSION));
  }
  statements.insert(statements.end(), others.begin(), others.end());
  for (size_t i = 0; i < tensors.size(); ++i) {
    statements.push_back(
        fmt::format("tensor {}: '{}' ({}){}", i, tensors[i].name, fmt::join(tensors[i].shape, " x "),
                    tensors[i].dtype == DType::f32 ? "" : std::string(" in ") + long_name(tensors[i].dtype)));
  }
  return statements;
}

void agree_on_reducer(ApiComm& comm, const CompressionSpec& spec, const std::vector<GradientTensor>& tensors,
                      const ReducerOptions& options, const std::string& tag) {
  Communicator& group = *comm.communicator;
  if (group.world() == 1) return;
  const std::vector<std::string> statements = reducer_statements(
      comm, {spec}, tensors, options.bucket_bytes, options.seed,
      {options.average ? "the mean" : "the sum", options.sharded ? "sharded" : "not sharded",
       options.skip_unused ? "skip_unused" : "no skip_unused", tag.empty() ? "no tag" : "tag" + shown(tag)});
  agree_on(group.transport(), comm.stream, statements, "gw_reducer_create");
}

ApiReducer::ApiReducer(std::shared_ptr<ApiComm> c, const CompressionSpec& s, std::vector<GradientTensor> t,
                       const ReducerOptions& o)
    : comm(std::move(c)),
      spec(s),
      tensors(std::move(t)),
      options(o),
      reducer(*comm->communicator, spec, tensors, options),
      description(reducer.describe()) {}

void ApiReducer::set_addresses(const std::vector<void*>& addresses) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (addresses[i] == nullptr && tensors[i].count() > 0) return;
  }
  reducer.adopt(addresses);
  addresses_known_ = true;
}

void ApiReducer::allreduce(void* const* given, void* native_stream) {
  const Stream caller = comm->caller_stream(native_stream);
  check_between_steps();
  if (given != nullptr) {
    for (size_t i = 0; i < tensors.size(); ++i) check_alignment(tensors[i], given[i]);
    reducer.adopt({given, tensors.size()});
    addresses_known_ = true;
  }
  require(addresses_known_,
          "grads is null and the gradients' addresses are unknown: set gw_tensor.grad, or pass grads");
  announce_loaded_state();
  for (int i = 0; i < reducer.tensors(); ++i) {
    add_unsent(i, caller);
    reducer.ready(i, caller);
  }
  comm->wait_or_notify([&] { reducer.wait(caller); });
}

void ApiReducer::apply(void* const* grads, const gw_state* states, const int32_t* step, void* native_stream) {
  check_between_steps();
  std::vector<std::pair<TensorState, float*>> all;  // the address of the caller's copy; null: none
  for (TensorState& state : reducer.tensor_state()) {
    const auto& [residual, factor] = states[state.tensor];
    const bool p = state.kind == "factor_p";
    if (state.kind == kResidualKind) {
      all.emplace_back(std::move(state), residual);
      continue;
    }
    require(p || state.kind == "factor", "spec '{}' keeps '{}', which gw_state lacks", spec.to_string(),
            state.kind);
    require(factor != nullptr, "the factor of '{}' is null", tensors[state.tensor].name);
    const GradientTensor& tensor = tensors[state.tensor];
    const int64_t q_elements = p ? tensor.count() / tensor.shape[0] * state.shape[1] : 0;
    all.emplace_back(std::move(state), factor + q_elements);
  }
  for (size_t i = 0; i < tensors.size(); ++i) check_alignment(tensors[i], grads[i]);
  reducer.adopt({grads, tensors.size()});
  addresses_known_ = true;
  const Stream& stream = comm->stream;
  const auto bytes = [](const TensorState& state, float* at) {
    return std::span(reinterpret_cast<std::byte*>(at), static_cast<size_t>(state.bytes()));
  };
  comm->between(native_stream, [&] {
    int32_t number = 0;
    copy(stream, &number, step, sizeof number);
    stream.synchronize();
    for (const auto& [state, at] : all)
      at != nullptr ? state.write(stream, 0, bytes(state, at)) : state.clear(stream);
    reducer.resume_at(number);
    for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
    reducer.wait(stream);
    for (const auto& [state, at] : all) {
      if (at != nullptr) state.read(stream, 0, bytes(state, at));
    }
  });
}

void ApiReducer::begin_step() {
  require(addresses_known_,
          "the gradients' addresses are unknown: set gw_tensor.grad, or call gw_reducer_allreduce first");
  announce_loaded_state();
}

void ApiReducer::ready(int32_t tensor, void* native_stream) {
  begin_step();
  const Stream caller = comm->caller_stream(native_stream);
  add_unsent(tensor, caller);
  reducer.ready(tensor, caller);
  ++ready_;
}

void ApiReducer::wait(void* native_stream) {
  if (options.skip_unused) begin_step();  // perhaps no tensor was marked ready
  comm->wait_or_notify([&] { reducer.wait(comm->caller_stream(native_stream)); });
  ready_ = 0;
}

gw_stats ApiReducer::stats() const {
  require<DeviceError>(in_flight == nullptr || in_flight->done.query(),
                       "the last step is in flight: wait for its request first");
  gw_stats out{};
  out.size = sizeof out;
  out.steps = reducer.steps();
  if (out.steps > first_step_) {
    const ReducerStats last = reducer.stats(out.steps - 1);
    out.wire_bytes = last.wire_bytes;
    out.dense_bytes = last.dense_bytes;
    out.comm_ms = last.comm_ms;
    out.exposed_comm_ms = last.exposed_comm_ms;
  }
  out.extra_bytes = reducer.extra_bytes();
  out.buckets = reducer.buckets();
  out.buckets_in_place = reducer.buckets_in_place();
  out.description = description.c_str();
  return out;
}

}  // namespace gradwire::c_api

// gw_choose().

namespace gradwire::c_api {
namespace {

constexpr int32_t kMaxSpecs = 1000;

std::vector<CompressionSpec> read_specs(const gw_choose_options& o) {
  require(o.n_specs >= 1 && o.n_specs <= kMaxSpecs, "n_specs is {}; it must be from 1 to {}", o.n_specs,
          kMaxSpecs);
  require(o.specs != nullptr, "specs is null; pass {} specs", o.n_specs);
  std::vector<CompressionSpec> specs;
  for (int32_t i = 0; i < o.n_specs; ++i) {
    require(o.specs[i] != nullptr, "specs[{}] is null", i);
    const CompressionSpec& spec = specs.emplace_back(CompressionSpec::parse(o.specs[i]));
    const std::string why = choice_obstacle(spec);
    require(why.empty(), "spec '{}' cannot be a choice: {}", o.specs[i], why);
  }
  return specs;
}

ChooseOptions read_limits(const gw_choose_options& o) {
  ChooseOptions options;
  require(std::isfinite(o.error) && o.error >= 0, "error is {}; it must be 0 or more", o.error);
  if (o.error > 0) options.error = o.error;
  require(o.bucket_bytes >= 0, "bucket_bytes is {}; it must not be negative", o.bucket_bytes);
  if (o.bucket_bytes > 0) options.bucket_bytes = o.bucket_bytes;
  options.seed = o.seed;
  require(std::isfinite(o.compute_ms) && 0 <= o.backward_ms && o.backward_ms <= o.compute_ms,
          "backward_ms is {} and compute_ms {}; backward is a part of a step's computation", o.backward_ms,
          o.compute_ms);
  options.compute_ms = o.compute_ms;
  options.backward_ms = o.backward_ms;
  return options;
}

}  // namespace
}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" gw_status gw_choose(gw_comm comm, const gw_tensor* tensors, int32_t n_tensors,
                               const gw_choose_options* options, void* stream, gw_trial* trials,
                               int32_t* chosen) {
  return guarded(__func__, [&] {
    LockedComm locked(comm);
    require(chosen != nullptr, "chosen is null");
    require(n_tensors > 0, "n_tensors is {}; pass the model's gradients", n_tensors);
    require(options != nullptr, "options is null; pass the specs to choose from");
    const auto given = read_struct<gw_choose_options>(options, "gw_choose_options");
    const std::vector<CompressionSpec> specs = read_specs(given);
    const ChooseOptions limits = read_limits(given);
    std::vector<void*> grads;
    const std::vector<GradientTensor> read = read_tensors(tensors, n_tensors, &grads);
    for (size_t i = 0; i < read.size(); ++i) {
      require(grads[i] != nullptr || read[i].count() == 0,
              "tensor {} ('{}') has no gradient: set gw_tensor.grad", i, read[i].name);
    }
    const Stream caller = locked->caller_stream(stream);
    if (locked->communicator->world() > 1) {
      agree_on(locked->communicator->transport(), locked->stream,
               reducer_statements(*locked.comm, specs, read, limits.bucket_bytes, limits.seed,
                                  {fmt::format("error {}", limits.error)}),
               "gw_choose");
    }
    std::vector<SpecTrial> found;
    size_t choice = 0;
    locked->wait_or_notify([&] {
      choice = choose_spec(*locked->communicator, locked->stream, caller, specs, read, grads, limits, found);
    });
    for (size_t i = 0; trials != nullptr && i < found.size(); ++i) {
      const SpecTrial& t = found[i];
      trials[i] = {.error = t.error, .communicate_ms = t.communicate_ms, .exposed_ms = t.exposed_ms};
    }
    *chosen = static_cast<int32_t>(choice);
  });
}
