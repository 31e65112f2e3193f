// Writes the bits that the library computes, for scripts/golden.py, which hashes them.
//
//   golden_results FILE [--few]      --few: a part of the specs and worlds
//
// FILE has a line KEY<TAB>BYTES for each value, followed by these bytes. All calls are the C ABI's; the lists
// of specs and schedules are the library's.
#include <fmt/format.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <set>

#include "tests/capi/ranks.h"
#include "tests/collectives/conservation.h"
#include "tests/collectives/example_specs.h"

namespace {

using Bytes = std::vector<char>;

std::FILE* output;

void append(Bytes& bytes, const void* data, size_t size) {
  const auto* from = static_cast<const char*>(data);
  bytes.insert(bytes.end(), from, from + size);
}

struct Shape {
  int world, per_node;  // ranks, and ranks per node in hierarchical schedules
};

std::vector<Shape> shapes(bool few) {
  if (few) return {{3, 1}, {4, 2}};
  std::vector<Shape> all;
  for (int world = 1; world <= 8; ++world) all.push_back({world, gradwire::testing::ranks_per_node(world)});
  all.push_back({8, 4});
  return all;
}

// Returns every example spec with every schedule.
std::set<std::string> specs(bool few) {
  if (few) return {"fp32:schedule=tree", "int8:schedule=ring", "powersgd:rank=2,schedule=hierarchical"};
  const auto others = gradwire::example_specs_with_schedules();
  std::set<std::string> all(others.begin(), others.end());
  for (const std::string& spec : gradwire::example_specs()) {
    for (const std::string& schedule : gradwire::testing::schedule_names()) {
      all.insert(spec + (spec.find(':') == std::string::npos ? ":" : ",") + "schedule=" + schedule);
    }
  }
  return all;
}

// Runs body(comm, rank, result, state) on all ranks and writes what it appends to `result` and `state`.
template <typename Body>
void run(const std::string& kind, const std::string& spec, Shape shape, const Body& body) {
  std::vector<Bytes> results(shape.world), states(shape.world);
  capi::run_ranks_at(
      capi::fresh_name(), shape.world, 60'000,
      [&](gw_comm comm, int rank) { body(comm, rank, results[rank], states[rank]); }, shape.per_node);
  for (const auto& [name, all] : {std::pair(kind, &results), std::pair("state of " + kind, &states)}) {
    for (int rank = 0; rank < shape.world; ++rank) {
      const Bytes& bytes = (*all)[rank];
      if (bytes.empty()) continue;
      fmt::print(output, "{}/{}@{} ranks, {} per node: rank {}\t{}\n", name, spec, shape.world,
                 shape.per_node, rank, bytes.size());
      std::fwrite(bytes.data(), 1, bytes.size(), output);
    }
  }
}

// Returns this rank's gradients of one step. A tensor of 16-bit elements occupies the first half of its
// floats.
std::vector<float> gradients(const capi::Model& model, int rank, int step) {
  auto values =
      capi::normal(static_cast<int64_t>(model.elements()), static_cast<uint32_t>(100 * rank + step));
  if (model.dtype == GW_FLOAT32) return values;
  const uint32_t exponents = model.dtype == GW_BFLOAT16 ? 0x3c003c00 : 0x20002000;
  for (float& v : values) v = std::bit_cast<float>((std::bit_cast<uint32_t>(v) & 0x87ff87ff) | exponents);
  return values;
}

// Appends the elements whose mean this rank has.
void append_means(Bytes& bytes, const capi::Reducer& reducer, std::vector<float>& values) {
  int32_t count = 0;
  GW_EXPECT_OK(gw_reducer_shards(reducer.handle, nullptr, 0, &count));
  std::vector<gw_range> ranges(count);
  GW_EXPECT_OK(gw_reducer_shards(reducer.handle, ranges.data(), count, &count));
  const auto tensors = reducer.model.addresses(values.data());
  for (const gw_range& r : ranges) {
    append(bytes, static_cast<const float*>(tensors[r.tensor]) + r.begin, 4 * (r.end - r.begin));
  }
}

// Writes the means and the states of two steps of a reducer.
void write_reducer(const std::string& kind, const std::string& spec, Shape shape, gw_dtype dtype) {
  run(kind, spec, shape, [&](gw_comm comm, int rank, Bytes& means, Bytes& state) {
    capi::Model model;
    model.dtype = dtype;
    gw_reducer_options options = capi::options(16 << 10);
    options.shard = kind == "sharded";
    options.seed = 5;
    gw_reducer made = nullptr;
    GW_ASSERT_OK(capi::create_reducer(comm, spec, model.tensors(), &options, &made));
    const capi::Reducer reducer(made);
    for (int step = 0; step < 2; ++step) {
      std::vector<float> values = gradients(model, rank, step);
      GW_ASSERT_OK(reducer.step(values));
      // Without shards all ranks have the same means.
      if (options.shard != 0 || rank == 0) append_means(means, reducer, values);
    }
    const gw_stats stats = capi::stats_of(made);
    append(means, &stats.wire_bytes, sizeof stats.wire_bytes);
    state = reducer.save();
  });
}

// Writes the results of every collective on the caller's memory, called twice with the same residual.
void write_collectives(const std::string& spec, Shape shape) {
  run("collective", spec, shape, [&](gw_comm comm, int rank, Bytes& results, Bytes& state) {
    std::vector<int64_t> counts;
    int64_t total = 0;
    for (int r = 0; r < shape.world; ++r) total += counts.emplace_back(r == 1 ? 0 : 1031 * (r + 1));
    using Floats = std::vector<float>;
    Floats part(counts[rank]), all(total), replica(total), residuals[] = {Floats(total), part, Floats(total)};
    const auto with = [&](int i) { return capi::call({.residual = residuals[i].data()}); };
    const auto record = [&](gw_status status, const Floats& values) {
      append(results, &status, sizeof status);
      if (status == GW_OK) append(results, values.data(), 4 * values.size());
    };
    const int64_t* n = counts.data();
    const char* name = spec.c_str();
    for (int step = 0; step < 2; ++step) {
      Floats in = capi::normal(total, static_cast<uint32_t>(100 * rank + step)), buffer = in;
      record(gw_reduce_scatter(comm, in.data(), part.data(), n, GW_FLOAT32, GW_AVG, name, nullptr, with(0)),
             part);
      record(gw_all_gather(comm, in.data(), all.data(), n, GW_FLOAT32, name, nullptr, with(1)), all);
      record(gw_all_gather_update(comm, in.data(), replica.data(), n, GW_FLOAT32, name, nullptr, nullptr),
             replica);
      record(gw_broadcast(comm, buffer.data(), total, GW_FLOAT32, shape.world - 1, name, nullptr, nullptr),
             buffer);
      record(gw_allreduce(comm, in.data(), total, GW_FLOAT32, GW_SUM, name, nullptr, with(2)), in);
    }
    for (const Floats& residual : residuals) append(state, residual.data(), 4 * residual.size());
  });
}

// Registers a format that sends the upper halves of 32 floats.
void register_format() {
  auto format = capi::sized<gw_format>();
  format.name = "registered";
  format.block = 32;
  format.bytes = 64;
  format.encode = [](void*, const float* values, int64_t blocks, uint8_t* bytes) -> const char* {
    for (int64_t i = 0; i < 32 * blocks; ++i) {
      const uint32_t upper = std::bit_cast<uint32_t>(values[i]) >> 16;
      std::memcpy(bytes + 2 * i, &upper, 2);
    }
    return nullptr;
  };
  format.decode = [](void*, const uint8_t* bytes, int64_t blocks, float* values) -> const char* {
    for (int64_t i = 0; i < 32 * blocks; ++i) {
      values[i] = std::bit_cast<float>(bytes[2 * i] << 16 | bytes[2 * i + 1] << 24);
    }
    return nullptr;
  };
  GW_EXPECT_OK(gw_format_register(&format));
}

}  // namespace

int main(int argc, char** argv) {
  const bool few = argc == 3 && std::string(argv[2]) == "--few";
  if ((argc != 2 && !few) || (output = std::fopen(argv[1], "wb")) == nullptr) {
    std::fputs("usage: golden_results FILE [--few]\n", stderr);
    return 2;
  }
  register_format();
  for (const std::string& spec : specs(few)) {
    for (const Shape& shape : shapes(few)) write_reducer("result", spec, shape, GW_FLOAT32);
  }
  auto once = few ? std::vector<std::string>{"int8"} : gradwire::example_specs();
  once.insert(once.end(), {"registered", "powersgd:rank=2,wire=registered"});
  for (const std::string& spec : once) {
    write_reducer("bf16", spec, {3, 1}, GW_BFLOAT16);
    write_reducer("fp16", spec, {3, 1}, GW_FLOAT16);
    for (const Shape& shape : {Shape{3, 1}, Shape{4, 2}}) {
      write_reducer("sharded", spec, shape, GW_FLOAT32);
      write_collectives(spec, shape);
    }
  }
  return std::fclose(output) != 0 || testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
}
