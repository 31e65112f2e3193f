// Saves and loads a reducer's checkpoint (saved_state.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "collectives/c_api/saved_state.h"
#include "runtime/device/unwinding.h"
#include "runtime/util/crc32.h"
#include "runtime/util/mix.h"

namespace gradwire::c_api {
namespace {

int64_t rows_of(const GradientTensor& t) {
  return t.shape[0];
}
int64_t cols_of(const GradientTensor& t) {
  return t.shape.size() > 1 ? t.shape[1] : 1;
}

// Returns the ranks whose residuals are in the states, with digests of the residuals.
std::vector<LoadedResidual> residuals_in(const std::vector<SavedState>& states) {
  std::vector<LoadedResidual> found;
  for (const SavedState& state : states) {
    uint64_t digest = 0;
    bool zero = true;
    for (const SavedTensor& tensor : state.tensors) {
      for (const SavedEntry& e : tensor.entries) {
        if (e.kind != kResidualKind || e.is_zero()) continue;
        zero = false;
        digest = mix(digest, crc32(e.data, e.bytes()));
      }
    }
    if (!zero) found.push_back({state.identity.rank, state.identity.world, digest});
  }
  return found;
}

// Removes the residuals from the states. Returns the non-zero sums of the residuals by tensor.
std::map<size_t, std::vector<float>> take_residuals(std::vector<SavedState>& states,
                                                    const std::vector<GradientTensor>& tensors) {
  std::map<size_t, std::vector<float>> sums;
  for (SavedState& state : states) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::erase_if(state.tensors[i].entries, [&](const SavedEntry& e) {
        if (e.kind != kResidualKind || e.is_zero()) return false;
        require(e.dtype == DType::f32 && e.count == static_cast<uint64_t>(tensors[i].count()),
                "the residual of '{}' has {} elements of {} in the state, {} of F32 in the reducer",
                tensors[i].name, e.count, name(e.dtype), tensors[i].count());
        add_residual(sums[i], e.floats());
        return true;
      });
    }
  }
  return sums;
}

}  // namespace

// The places from which a reducer's state is loaded. Removes the entries that it uses from the saved states.
class ApiReducer::Sources {
 public:
  Sources(const std::vector<TensorState>& targets, const ApiReducer& reducer, std::vector<SavedState>& states)
      : targets_(targets),
        reducer_(reducer),
        saved_world_(states[0].identity.world),
        world_(reducer.comm->communicator->world()) {
    for (const TensorState& target : targets_) of_.push_back(take(target, states[0]));
    for (size_t k = 1; k < states.size(); ++k) add_residuals(states[k]);
    for (const SavedState& state : states) check_rest(state);
  }

  // Enqueues the copies. The states must stay valid until `stream` has executed the copies.
  void load(const Stream& stream) const {
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (of_[k] != nullptr || !targets_[k].same_on_all_ranks) targets_[k].clear(stream);
    }
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (of_[k] == nullptr) continue;
      const auto* source = reinterpret_cast<const std::byte*>(of_[k]);
      targets_[k].write(stream, 0, {source, static_cast<size_t>(targets_[k].bytes())});
    }
  }

  // Returns a digest of the state that is the same on all ranks.
  uint64_t replicated_digest() const {
    uint64_t digest = 0;
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (!targets_[k].same_on_all_ranks || of_[k] == nullptr) continue;
      digest = mix(digest, crc32(of_[k], static_cast<size_t>(targets_[k].bytes())));
    }
    return digest;
  }

 private:
  // Returns the saved elements for `target`; null: the target becomes zero.
  const char* take(const TensorState& target, SavedState& state) const {
    auto& entries = state.tensors[static_cast<size_t>(target.tensor)].entries;
    const std::string& tensor = reducer_.tensors[static_cast<size_t>(target.tensor)].name;
    const auto entry = std::ranges::find(entries, target.kind, &SavedEntry::kind);
    if (entry == entries.end()) {
      const bool alone = saved_world_ == 1;  // a world of 1 saves no factors, because it has no codec
      require(target.kind == kResidualKind || alone, "the state has no '{}' of '{}'", target.kind, tensor);
      return nullptr;
    }
    require(entry->count == static_cast<uint64_t>(target.count()) && entry->dtype == target.dtype,
            "'{}' of '{}' has {} elements of {} in the state, {} of {} in the reducer", target.kind, tensor,
            entry->count, name(entry->dtype), target.count(), name(target.dtype));
    const char* const data = entry->data;
    entries.erase(entry);
    return is_loaded(target.kind, target.same_on_all_ranks, saved_world_, world_) ? data : nullptr;
  }

  // Adds another rank's residuals to the sources of residuals.
  void add_residuals(SavedState& state) {
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (targets_[k].kind != kResidualKind) continue;
      auto& entries = state.tensors[static_cast<size_t>(targets_[k].tensor)].entries;
      const auto count = static_cast<size_t>(targets_[k].count());
      const auto entry = std::ranges::find_if(entries, [&](const SavedEntry& e) {
        return e.kind == kResidualKind && e.dtype == DType::f32 && e.count == count;
      });
      if (entry == entries.end()) continue;
      std::vector<float> sum;
      if (of_[k] != nullptr) sum = SavedEntry{kResidualKind, DType::f32, count, of_[k]}.floats();
      add_residual(sum, entry->floats());
      sums_.push_back(std::move(sum));
      of_[k] = reinterpret_cast<const char*>(sums_.back().data());
      entries.erase(entry);
    }
  }

  // Throws BadInput if a state has entries that the reducer does not load. With an FP32 format a dense tensor
  // has a residual, always zero, only if its bucket also holds a matrix. So zeros may remain.
  void check_rest(const SavedState& state) const {
    for (size_t i = 0; i < state.tensors.size(); ++i) {
      for (const SavedEntry& e : state.tensors[i].entries) {
        if ((saved_world_ != world_ || world_ == 1) && e.kind != kResidualKind) continue;
        require(e.is_zero(), "'{}' has a '{}' in the state only", reducer_.tensors[i].name, e.kind);
      }
    }
  }

  const std::vector<TensorState>& targets_;
  const ApiReducer& reducer_;
  const int saved_world_, world_;
  std::vector<const char*> of_;           // [target]; null: the target becomes zero
  std::vector<std::vector<float>> sums_;  // sums of residuals of several ranks, to which sources point
};

std::string ApiReducer::identity() const {
  CompressionSpec same = spec;
  same.residual = kFp32;  // residuals are saved as FP32 whatever their format
  return fmt::format("spec {}; rank {} of {}; {}; seed {}", same.to_string(), comm->communicator->rank(),
                     comm->communicator->world(), options.average ? "mean" : "sum", options.seed);
}

void ApiReducer::check_between_steps() const {
  require(ready_ == 0, "in the middle of a step: {} tensors are ready; finish it with gw_reducer_wait",
          ready_);
}

size_t ApiReducer::state_size() const {
  size_t bytes = StateWriter::header_bytes(identity());
  for (const GradientTensor& t : tensors) bytes += StateWriter::tensor_bytes(t.name);
  for (const TensorState& s : reducer.tensor_state()) {
    bytes += StateWriter::entry_bytes(s.kind, static_cast<size_t>(s.bytes()));
  }
  for (const auto& [tensor, residual] : unsent_) {
    bytes += StateWriter::entry_bytes(kResidualKind, residual.size() * sizeof(float));
  }
  return bytes;
}

void ApiReducer::save_state(void* state, size_t size) const {
  require(state != nullptr, "state is null");
  check_between_steps();
  const size_t bytes = state_size();
  require(size >= bytes, "capacity is {}, the state needs {}", size, bytes);
  const FinishOnError finish(comm->stream);  // the caller may free `state`
  StateWriter writer(state, identity());
  const std::vector<TensorState> all = reducer.tensor_state();
  auto state_of = all.begin();  // the states of `all` have the order of the tensors
  for (int i = 0; i < reducer.tensors(); ++i) {
    const GradientTensor& t = tensors[static_cast<size_t>(i)];
    const auto end = std::find_if(state_of, all.end(), [i](const TensorState& s) { return s.tensor != i; });
    const auto unsent = unsent_.find(static_cast<size_t>(i));
    const auto entries = static_cast<size_t>(end - state_of) + (unsent != unsent_.end() ? 1 : 0);
    writer.add_tensor(rows_of(t), cols_of(t), t.name, entries);
    if (unsent != unsent_.end()) {
      const std::vector<float>& values = unsent->second;
      std::memcpy(writer.add_entry(DType::f32, std::ssize(values), kResidualKind), values.data(),
                  values.size() * sizeof(float));
    }
    for (; state_of != end; ++state_of) {
      // The copy runs in stream order, hence after the step. Elements need not be aligned in the state.
      state_of->read(comm->stream, 0,
                     {writer.add_entry(state_of->dtype, state_of->count(), state_of->kind),
                      static_cast<size_t>(state_of->bytes())});
    }
  }
  comm->stream.synchronize();
  writer.finish(reducer.steps());
}

// Parses a state of this run. Returns the state with the tensors in the reducer's order.
SavedState ApiReducer::read_state(const void* bytes, size_t size) const {
  SavedState state = SavedState::parse(bytes, size);
  require(state.identity.run == SavedIdentity::parse(identity()).run,
          "the state is of another reducer: '{}', this one is '{}'", state.identity_text, identity());
  require(state.tensors.size() == tensors.size(), "the state has {} tensors, the reducer {}",
          state.tensors.size(), tensors.size());
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  std::vector<SavedTensor> ordered(tensors.size());
  for (SavedTensor& t : state.tensors) {
    const auto found = index.find(t.name);
    require(found != index.end(), "tensor '{}' in the state is unknown to the reducer, or a duplicate",
            t.name);
    const size_t i = found->second;
    index.erase(found);
    require(t.rows == rows_of(tensors[i]) && t.cols == cols_of(tensors[i]),
            "tensor '{}' is {} x {} in the state, {} x {} in the reducer", t.name, t.rows, t.cols,
            rows_of(tensors[i]), cols_of(tensors[i]));
    ordered[i] = std::move(t);
  }
  state.tensors = std::move(ordered);
  return state;
}

void ApiReducer::load_state(const void* bytes, size_t size) {
  check_between_steps();
  SavedState state = read_state(bytes, size);
  const SavedIdentity ours = SavedIdentity::parse(identity());
  require(state.identity.world != ours.world || state.identity.rank == ours.rank,
          "the state is that of {}, this is {}: give each rank its own", state.identity.place(),
          ours.place());
  restore({std::move(state)});
}

void ApiReducer::load_states(const void* const* states, const size_t* sizes, int32_t n) {
  check_between_steps();
  require(n > 0 && states != nullptr && sizes != nullptr, "no states are given");
  std::map<int, SavedState> by_rank;
  for (int32_t k = 0; k < n; ++k) {
    SavedState state = read_state(states[k], sizes[k]);
    const SavedState& first = by_rank.empty() ? state : by_rank.begin()->second;
    require(state.identity.world == first.identity.world, "the states are of runs with {} and {} ranks",
            first.identity.world, state.identity.world);
    require(state.steps == first.steps, "the states are of steps {} and {}", first.steps, state.steps);
    const std::string place = state.identity.place();
    require(by_rank.emplace(state.identity.rank, std::move(state)).second, "two states are of {}", place);
  }
  const SavedIdentity ours = SavedIdentity::parse(identity());
  const int world = by_rank.begin()->second.identity.world;
  std::vector<SavedState> mine;
  for (int r : merged_ranks(ours.rank, ours.world, world)) {
    const auto found = by_rank.find(r);
    require(found != by_rank.end(),
            "{} needs the state that rank {} of {} saved; pass the states of all ranks", ours.place(), r,
            world);
    mine.push_back(std::move(found->second));
  }
  if (mine.empty()) {  // a new rank starts from the replicated state
    mine.push_back(std::move(by_rank.begin()->second));
    for (SavedTensor& tensor : mine[0].tensors) {
      std::erase_if(tensor.entries, [](const SavedEntry& e) { return e.kind == kResidualKind; });
    }
  }
  restore(std::move(mine));
}

// Loads the states. Checks all states before the first copy, because a rejected state must leave the reducer
// unchanged.
void ApiReducer::restore(std::vector<SavedState> states) {
  std::vector<LoadedResidual> residuals = residuals_in(states);
  std::map<size_t, std::vector<float>> unsent;
  // Without buckets, in a world of 1, no codec holds residuals.
  if (reducer.buckets() == 0) unsent = take_residuals(states, tensors);
  const std::vector<TensorState> targets = reducer.tensor_state();
  const Sources sources(targets, *this, states);

  const FinishOnError finish(comm->stream);  // the caller may free the states
  sources.load(comm->stream);
  comm->stream.synchronize();
  unsent_ = std::move(unsent);
  first_step_ = states[0].steps;
  reducer.resume_at(first_step_);
  loaded_.call.what = fmt::format("{} continues from a loaded state of step {}, factors {:08x}", options.name,
                                  first_step_, sources.replicated_digest() >> 32);
  loaded_.call.hash = mix(0x6c6f6164, loaded_.call.what);
  loaded_.residuals = std::move(residuals);
  loaded_.unannounced = true;
}

}  // namespace gradwire::c_api
