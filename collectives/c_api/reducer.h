// The object behind a gw_reducer, and its checkpoint.
#pragma once

#include "collectives/c_api/comm.h"
#include "collectives/reducer/reducer.h"
#include "collectives/reducer/snapshot.h"

namespace gradwire::c_api {

struct SavedState;

struct ApiReducer {
  ApiReducer(std::shared_ptr<ApiComm> comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
             const ReducerOptions& options);

  // Sets the addresses of the gradients. Does nothing unless all addresses are known.
  void set_addresses(const std::vector<void*>& addresses);
  void allreduce(void* const* grads, void* native_stream);
  // Runs a step with the caller's state: see gw_reducer_apply().
  void apply(void* const* grads, const gw_state* states, const int32_t* step, void* native_stream);
  void ready(int32_t tensor, void* native_stream);
  void wait(void* native_stream);
  gw_stats stats() const;

  // Save and load the state for checkpoints (state.cpp).
  // Saves the state, unless `state` is null. Returns the size of the state.
  size_t save_state(void* state, size_t capacity) const;
  void load_state(const void* bytes, size_t size);
  void load_states(const void* const* states, const size_t* sizes, int32_t n);

  const std::shared_ptr<ApiComm> comm;  // the communicator outlives the reducer
  const CompressionSpec spec;
  const std::vector<GradientTensor> tensors;
  const ReducerOptions options;
  Reducer reducer;
  const std::string description;
  // The request of the last step; null: the last call blocked until the step was done.
  std::shared_ptr<ApiRequest> in_flight;

 private:
  // Returns the properties that a state must match: spec, rank, world, options.
  std::string identity() const;
  void check_between_steps() const;
  size_t write_state(char* state) const;
  SavedState read_state(const void* bytes, size_t size) const;
  void restore(std::vector<SavedState> states);
  void check_rest(const std::vector<SavedState>& states, const Residuals& unsent) const;

  // Compares the loaded states of all ranks in the first step after a load. Fails the group if two ranks have
  // loaded the residual of the same rank. Collective; then blocks the caller.
  void announce_loaded_state();
  void begin_step();  // checks the addresses, and announces the state
  // Adds the tensor's residual in unsent_ to its gradient, and removes it from unsent_.
  void add_unsent(int32_t tensor, const Stream& stream);

  bool addresses_known_ = false;
  int ready_ = 0;           // number of ready tensors in the current step
  int64_t first_step_ = 0;  // the step at which this reducer began or resumed
  // The loaded state, until it is announced: what ranks must agree on, and for each residual the world and
  // the rank that saved it, and a digest.
  Call loaded_;
  std::vector<double> loaded_residuals_;
  bool unannounced_ = false;
  // Residuals loaded in a world of 1, which has no codec to hold residuals. The next step adds the residuals
  // to the gradients.
  Residuals unsent_;
};

// Return copies of the caller's array and struct, which may have the sizes of another version of the header.
std::vector<GradientTensor> read_tensors(const gw_tensor* tensors, int32_t n, std::vector<void*>* grads);
ReducerOptions read_options(const gw_reducer_options* options, std::string* tag);
// Returns the statements for agree_on() of calls that reduce gradients with these specs. `others` precede the
// tensors.
std::vector<std::string> reducer_statements(const ApiComm& comm, const std::vector<CompressionSpec>& specs,
                                            const std::vector<GradientTensor>& tensors, int64_t bucket_bytes,
                                            uint64_t seed, const std::vector<std::string>& others);
// Throws CommError on every rank unless all ranks create the same reducer. Collective.
void agree_on_reducer(ApiComm& comm, const CompressionSpec& spec, const std::vector<GradientTensor>& tensors,
                      const ReducerOptions& options, const std::string& tag);

}  // namespace gradwire::c_api
