// Ranks as threads that connect through "local://", for tests of the C ABI.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gradwire/gradwire.h>
#include "tests/support/normal.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/threads.h"

#define GW_EXPECT_OK(call) EXPECT_EQ(GW_OK, (call)) << gw_last_error()
#define GW_ASSERT_OK(call) ASSERT_EQ(GW_OK, (call)) << gw_last_error()
// Expects the call to fail with `status` and an error text that contains `part`.
#define GW_EXPECT_FAILS(status, part, call)                                                   \
  do {                                                                                        \
    EXPECT_EQ(status, (call)) << gw_last_error();                                             \
    EXPECT_NE(std::string(gw_last_error()).find(part), std::string::npos) << gw_last_error(); \
  } while (false)
#define GW_EXPECT_BAD(part, call) GW_EXPECT_FAILS(GW_BAD_ARGUMENT, part, call)

namespace capi {

using gradwire::testing::in_threads;
using gradwire::testing::normal;

inline std::string fresh_name() {
  static std::atomic<int> next{0};
  return "local://group" + std::to_string(next++);
}

// Returns a new rendezvous of "threads", or of "processes": ranks that join through a file communicate by
// TCP.
inline std::string fresh_rendezvous(const std::string& between) {
  if (between == "threads") return fresh_name();
  static const gradwire::testing::TemporaryFolder folder;
  static std::atomic<int> next{0};
  return "file://" + folder.path("group" + std::to_string(next++));
}

// Returns a structure of the header with its size set and all other members zero.
template <typename T>
T sized() {
  T t;
  std::memset(&t, 0, sizeof t);
  t.size = sizeof t;
  return t;
}

inline gw_comm_options comm_options(const char* rendezvous, int rank, int world, int device = GW_HOST,
                                    int64_t timeout_ms = 60'000) {
  auto o = sized<gw_comm_options>();
  o.rendezvous = rendezvous;
  o.rank = rank;
  o.world = world;
  o.device = device;
  o.timeout_ms = timeout_ms;
  return o;
}
inline gw_status create(const char* rendezvous, int rank, int world, int device, int64_t timeout_ms,
                        gw_comm* comm) {
  const gw_comm_options options = comm_options(rendezvous, rank, world, device, timeout_ms);
  return gw_comm_create(&options, comm);
}

inline gw_comm_info query(gw_comm comm) {
  auto info = sized<gw_comm_info>();
  GW_EXPECT_OK(gw_comm_query(comm, &info));
  return info;
}

// The options of a call, for use as an argument: gw_allreduce(..., call({.tag = "weight"})).
struct Call {
  const char* tag = nullptr;
  float* residual = nullptr;
  gw_request* request = nullptr;
};
class CallOptions {
 public:
  explicit CallOptions(const Call& c) {
    options_.tag = c.tag;
    options_.residual = c.residual;
    options_.request = c.request;
  }
  operator const gw_call_options*() const { return &options_; }  // NOLINT: implicit, for use as an argument

 private:
  gw_call_options options_ = sized<gw_call_options>();
};
inline CallOptions call(const Call& c) {
  return CallOptions(c);
}

// Adds float32 values over the ranks, in place.
inline gw_status sum(gw_comm comm, std::vector<float>& values, const std::string& spec = "fp32") {
  return gw_allreduce(comm, values.data(), static_cast<int64_t>(values.size()), GW_FLOAT32, GW_SUM,
                      spec.c_str(), nullptr, nullptr);
}
inline gw_status sum(gw_comm comm, float& value, const char* spec = "fp32") {
  return gw_allreduce(comm, &value, 1, GW_FLOAT32, GW_SUM, spec, nullptr, nullptr);
}
// Returns the sum of all ranks' `mine`, computed for 1000 equal elements.
inline float sum_of(gw_comm comm, float mine) {
  std::vector<float> values(1000, mine);
  GW_EXPECT_OK(sum(comm, values));
  EXPECT_EQ(values[0], values[999]);
  return values[999];
}

inline gw_status state_size(gw_reducer reducer, size_t* size) {
  return gw_reducer_state_save(reducer, nullptr, 0, size);
}
inline gw_status save_state(gw_reducer reducer, void* state, size_t capacity) {
  size_t bytes = 0;
  return gw_reducer_state_save(reducer, state, capacity, &bytes);
}

inline void run_ranks_at(const std::string& name, int world, int64_t timeout_ms,
                         const std::function<void(gw_comm, int)>& body, int ranks_per_node = 0) {
  in_threads(world, [&](int r) {
    gw_comm comm = nullptr;
    auto how = comm_options(name.c_str(), r, world, GW_HOST, timeout_ms);
    how.ranks_per_node = ranks_per_node;
    GW_ASSERT_OK(gw_comm_create(&how, &comm));
    body(comm, r);
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}
inline void run_ranks(int world, int64_t timeout_ms, const std::function<void(gw_comm, int)>& body) {
  run_ranks_at(fresh_name(), world, timeout_ms, body);
}
inline void run_ranks(int world, const std::function<void(gw_comm, int)>& body) {
  run_ranks(world, 60'000, body);
}

// A small model: large matrices, a matrix too small to compress, vectors, a scalar, an empty tensor.
struct Model {
  std::vector<std::string> names{"bias", "tall", "wide", "tiny", "scalar", "empty", "square"};
  std::vector<int64_t> rows{37, 129, 17, 3, 1, 0, 64}, cols{1, 31, 203, 3, 1, 5, 64};
  gw_dtype dtype = GW_FLOAT32;

  size_t count(size_t i) const { return static_cast<size_t>(rows[i] * cols[i]); }
  size_t elements() const {
    size_t sum = 0;
    for (size_t i = 0; i < names.size(); ++i) sum += count(i);
    return sum;
  }
  // Returns the addresses of the tensors, packed one after another from `flat` on.
  std::vector<void*> addresses(float* flat) const {
    std::vector<void*> all;
    for (size_t i = 0; i < names.size(); ++i) {
      all.push_back(flat);
      flat += count(i);
    }
    return all;
  }
  std::vector<gw_tensor> tensors(float* flat = nullptr) const {
    std::vector<gw_tensor> all;
    auto at = addresses(flat);
    for (size_t i = 0; i < names.size(); ++i) {
      auto t = sized<gw_tensor>();
      t.name = names[i].c_str();
      t.rows = rows[i];
      t.cols = cols[i];
      t.dtype = dtype;
      t.grad = flat == nullptr ? nullptr : at[i];
      all.push_back(t);
    }
    return all;
  }
};

inline gw_reducer_options options(int64_t bucket_bytes = 0) {
  auto o = sized<gw_reducer_options>();
  o.bucket_bytes = bucket_bytes;
  return o;
}

inline gw_status create_reducer(gw_comm comm, const std::string& spec, const std::vector<gw_tensor>& tensors,
                                const gw_reducer_options* how, gw_reducer* reducer) {
  return gw_reducer_create(comm, spec.c_str(), tensors.data(), static_cast<int32_t>(tensors.size()), how,
                           reducer);
}

inline gw_stats stats_of(gw_reducer reducer) {
  auto s = sized<gw_stats>();
  GW_EXPECT_OK(gw_reducer_stats(reducer, &s));
  return s;
}

// A reducer, destroyed at the end of its scope.
struct Reducer {
  explicit Reducer(gw_reducer made) : handle(made) {}
  Reducer(gw_comm comm, const std::string& spec, const Model& tensors, int64_t bucket_bytes = 16 << 10)
      : model(tensors) {
    const auto how = options(bucket_bytes);
    GW_EXPECT_OK(create_reducer(comm, spec, model.tensors(), &how, &handle));
  }
  ~Reducer() { GW_EXPECT_OK(gw_reducer_destroy(handle)); }
  Reducer(const Reducer&) = delete;

  // Averages the model's gradients in place. The gradients are packed one after another.
  gw_status step(std::vector<float>& gradients) const {
    return gw_reducer_allreduce(handle, model.addresses(gradients.data()).data(), nullptr, nullptr);
  }
  gw_status load(const std::vector<char>& state) const {
    return gw_reducer_state_load(handle, state.data(), state.size());
  }
  std::vector<char> save() const {
    size_t size = 0;
    GW_EXPECT_OK(state_size(handle, &size));
    std::vector<char> state(size);
    GW_EXPECT_OK(save_state(handle, state.data(), state.size()));
    return state;
  }

  Model model;
  gw_reducer handle = nullptr;
};

}  // namespace capi
