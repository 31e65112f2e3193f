// One rank of a reducer's test: oddly shaped tensors, a reducer for these tensors, and steps with given
// gradients.
#pragma once

#include <algorithm>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "tests/collectives/group.h"

namespace gradwire::testing {

// Returns tensors of odd shapes: vectors, matrices that are large enough or too small to compress, a 4-D
// convolution, a scalar, and an empty tensor.
inline std::vector<GradientTensor> model() {
  return {{"bias", {37}},          {"tall", {129, 31}}, {"wide", {17, 203}},
          {"tiny", {3, 3}},        {"scalar", {}},      {"empty", {0, 5}},
          {"conv", {24, 3, 5, 5}}, {"one", {1}},        {"square", {64, 64}}};
}

inline int64_t count_of(const GradientTensor& t) {
  return t.count();
}

// Returns the values of a tensor state of type float.
inline std::vector<float> values_of(const Stream& stream, const TensorState& state) {
  std::vector<float> values(state.count());
  state.read(stream, 0, std::as_writable_bytes(std::span(values)));
  stream.synchronize();
  return values;
}

// A reducer, and the stream on which this rank writes and reads gradients.
struct Rank {
  // Cuts messages into slices in worlds of 2 and 4 ranks, so that transfers overlap. Slices cause additional
  // wake-ups, so other worlds do not use slices. (SlicesChangeNoBit shows that slices do not change bits.)
  Rank(Communicator& comm, const std::string& spec, std::vector<GradientTensor> tensors, int64_t bucket_bytes)
      : Rank(comm, spec, std::move(tensors), bucket_bytes,
             comm.world() == 2 || comm.world() == 4 ? 1000 : 0) {}
  Rank(Communicator& comm, const std::string& spec, std::vector<GradientTensor> tensors, int64_t bucket_bytes,
       int64_t slice_bytes)
      : Rank(comm, spec, std::move(tensors),
             ReducerOptions{.bucket_bytes = bucket_bytes, .seed = 5, .slice_bytes = slice_bytes}) {}
  Rank(Communicator& comm, const std::string& spec, std::vector<GradientTensor> tensors,
       ReducerOptions options)
      : tensors(std::move(tensors)),
        stream(Stream::create(comm.device(), "compute")),
        reducer(comm, CompressionSpec::parse(spec), this->tensors, std::move(options)) {}

  // Writes each tensor's gradient, marks it ready, waits, and returns the averaged flat gradient.
  std::vector<float> step(const std::vector<std::vector<float>>& gradients) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      copy(stream, reducer.gradient(static_cast<int>(i)), gradients[i].data(),
           gradients[i].size() * sizeof(float));
      reducer.ready(static_cast<int>(i), stream);
    }
    reducer.wait(stream);
    return to_host(stream, reducer.gradients().as<const float>(), reducer.elements());
  }

  // Returns the residual of every element, laid out as the flat gradient. Elements without a residual are
  // zero.
  std::vector<float> residual() {
    std::vector<float> all(reducer.elements());
    for (const TensorState& s : reducer.tensor_state()) {
      if (s.kind != kResidualKind) continue;
      auto part = values_of(stream, s);
      std::copy(part.begin(), part.end(), all.begin() + reducer.offset(s.tensor));
    }
    return all;
  }

  std::vector<GradientTensor> tensors;
  Stream stream;
  Reducer reducer;
};

// Returns normal draws, different for each seed and tensor. The draws are pieces of a pool, because drawing
// new values each time takes a quarter of the time of tests with hundreds of steps.
inline std::vector<std::vector<float>> gradients_for(const std::vector<GradientTensor>& tensors,
                                                     uint32_t seed) {
  static const std::vector<float> pool = normal(1 << 20, 1);
  std::vector<std::vector<float>> gradients;
  std::minstd_rand random(seed + 1);
  for (const GradientTensor& tensor : tensors) {
    const auto count = static_cast<size_t>(count_of(tensor));
    if (count >= pool.size()) throw std::runtime_error("gradients_for: a tensor larger than the pool");
    random.discard(3);  // generators with neighbouring seeds start with similar draws
    const auto from = pool.begin() + static_cast<std::ptrdiff_t>(random() % (pool.size() - count));
    gradients.emplace_back(from, from + static_cast<std::ptrdiff_t>(count));
  }
  return gradients;
}

// Returns the given gradients, laid out as the reducer's flat buffer.
inline std::vector<float> flat(const Rank& rank, const std::vector<std::vector<float>>& gradients) {
  std::vector<float> all(rank.reducer.elements(), 0.0f);
  for (size_t i = 0; i < gradients.size(); ++i) {
    std::copy(gradients[i].begin(), gradients[i].end(),
              all.begin() + rank.reducer.offset(static_cast<int>(i)));
  }
  return all;
}

}  // namespace gradwire::testing
