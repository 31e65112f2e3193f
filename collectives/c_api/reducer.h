// What a gw_reducer refers to, and its checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/c_api/comm.h"
#include "collectives/reducer/reducer.h"

namespace gradwire::c_api {

struct SavedState;

// The rank that saved a residual, and a digest of its values.
struct LoadedResidual {
  int rank = 0, world = 0;
  uint64_t digest = 0;
};

struct ApiReducer {
  ApiReducer(std::shared_ptr<ApiComm> comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
             const ReducerOptions& options);

  // The addresses of the gradients; ignored unless all are known.
  void set_addresses(const std::vector<void*>& addresses);
  void allreduce(void* const* grads, void* native_stream);
  void ready(int32_t tensor, void* native_stream);
  void wait(void* native_stream);
  std::vector<gw_range> shards() const;
  gw_stats stats() const;

  // Checkpoints, in state.cpp.
  size_t state_size() const;
  void save_state(void* state, size_t size) const;
  void load_state(const void* bytes, size_t size);
  void load_states(const void* const* states, const size_t* sizes, int32_t n);

  const std::shared_ptr<ApiComm> comm;  // outlives the reducer
  const CompressionSpec spec;
  const std::vector<GradientTensor> tensors;
  const ReducerOptions options;
  Reducer reducer;
  const std::string description;
  std::shared_ptr<ApiRequest> in_flight;  // of the last step; null: it was done when its call returned

 private:
  class Sources;
  // Returns the properties that a state must match: spec, rank, world, options.
  std::string identity() const;
  void check_between_steps() const;
  SavedState read_state(const void* bytes, size_t size) const;
  void restore(std::vector<SavedState> states);

  // Compares the loaded states of all ranks, before the first step after a load. In loaded_state.cpp.
  void announce_loaded_state();
  void refuse_residuals_loaded_twice() const;
  // Adds the tensor's residual in unsent_ to its gradient, and removes it from unsent_.
  void add_unsent(int32_t tensor, const Stream& stream);

  bool addresses_known_ = false;
  int ready_ = 0;           // tensors, in the current step
  int64_t first_step_ = 0;  // where this reducer began or resumed
  struct Loaded {
    Call call;
    std::vector<LoadedResidual> residuals;
    bool unannounced = false;
  };
  Loaded loaded_;
  // By tensor: loaded residuals in a world of 1, which the next gradients include. Such a rank has no codec.
  std::map<size_t, std::vector<float>> unsent_;
};

// Read the caller's array and struct, whose sizes may come from another version of the header.
std::vector<GradientTensor> read_tensors(const gw_tensor* tensors, int32_t n, std::vector<void*>* grads);
ReducerOptions read_options(const gw_reducer_options* options, std::string* tag);
// Collective: throws CommError on every rank unless all create the same reducer.
void agree_on_reducer(ApiComm& comm, const CompressionSpec& spec, const std::vector<GradientTensor>& tensors,
                      const ReducerOptions& options, const std::string& tag);

}  // namespace gradwire::c_api
