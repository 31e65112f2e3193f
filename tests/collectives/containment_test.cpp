// A non-finite gradient affects only its tensor. For every spec, the results and residuals of other tensors
// are unchanged bit for bit, and the finite elements of the same tensor are conserved.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tests/collectives/conservation.h"
#include "tests/collectives/example_specs.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

namespace containment {

enum class Layout { gaps, packed, sharded };
constexpr const char* kLayouts[] = {"gaps", "packed", "sharded"};

struct Poison {
  int tensor = 0;
  std::vector<size_t> elements;
  float value = 0;
  int rank = 0;
};

// Returns matrices and vectors that start and end anywhere in a block. Some tensors are shorter than a block.
std::vector<GradientTensor> tensors() {
  return {{"a", {61, 45}}, {"bias", {37}},  {"b", {40, 33}}, {"tiny", {3, 3}},
          {"one", {1}},    {"c", {70, 31}}, {"d", {1500}},   {"e", {64, 40}}};
}

// Results, residuals and gradients of the third step, and the residuals before that step.
struct Outcome {
  std::vector<std::vector<std::vector<float>>> result, residual, before, gradient;  // [rank][tensor][element]
};

std::vector<std::vector<float>> by_tensor(Rank& rank, const std::vector<float>& flat) {
  std::vector<std::vector<float>> all;
  for (size_t t = 0; t < rank.tensors.size(); ++t) {
    const auto at = flat.begin() + rank.reducer.offset(static_cast<int>(t));
    all.emplace_back(at, at + rank.tensors[t].count());
  }
  return all;
}

Outcome run(Device device, const std::string& spec, int world, Layout layout, const Poison& poison,
            bool clean) {
  Outcome all;
  const auto ranks = static_cast<size_t>(world);
  for (auto* part : {&all.result, &all.residual, &all.before, &all.gradient}) part->resize(ranks);
  run_ranks(world, device, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    comm.set_ranks_per_node(ranks_per_node(world));
    Rank rank(comm, spec, tensors(),
              {.bucket_bytes = 24 << 10,
               .seed = 5,
               .alignment = layout == Layout::packed ? 1 : 4,
               .slice_bytes = world == 3 ? 1000 : 0,
               .sharded = layout == Layout::sharded});
    for (int s = 0; s < 3; ++s) {
      auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * world + comm.rank() + 1));
      // The poisoned elements are 0 on all other ranks and in all other steps, because a format's scale is
      // that of the sum's finite values.
      const bool now = s == 2 && comm.rank() == poison.rank && !clean;
      for (size_t i : poison.elements) gradients[poison.tensor][i] = now ? poison.value : 0.0f;
      if (s == 2) {
        all.before[r] = by_tensor(rank, rank.residual());
        all.gradient[r] = gradients;
      }
      auto flat = rank.step(gradients);
      if (s < 2) continue;
      // With a sharded reducer, only the owned ranges contain the mean. Other elements are unspecified.
      if (layout == Layout::sharded) {
        std::vector<float> owned(flat.size(), 0.0f);
        for (const ElementRange& part : rank.reducer.owned()) {
          std::copy(flat.begin() + part.begin, flat.begin() + part.end, owned.begin() + part.begin);
        }
        flat = owned;
      }
      all.result[r] = by_tensor(rank, flat);
      all.residual[r] = by_tensor(rank, rank.residual());
    }
    auto next = rank.step(gradients_for(rank.tensors, 99));
    for (float v : next) ASSERT_TRUE(std::isfinite(v)) << spec << ": in the next step";
  });
  return all;
}

// Returns an element's mean. With a sharded reducer, takes the mean from the rank that owns the element.
float mean_of(const Outcome& o, Layout layout, size_t tensor, size_t element) {
  float mean = o.result[0][tensor][element];
  for (size_t r = 1; layout == Layout::sharded && r < o.result.size(); ++r) {
    const float other = o.result[r][tensor][element];
    mean = other == 0.0f ? mean : other;
  }
  return mean;
}

// Returns whether a NaN in one tensor may change values of another tensor. Possible ways are the selected
// positions in a block, the scale of a block of factors or chosen values, and the scale of int8 residuals.
bool shares(const CompressionSpec& spec) {
  const bool summed = spec.method != CompressionSpec::Method::wire;
  return spec.wire->selects || (!spec.residual->exact && spec.residual->granularity > 8) ||
         (summed && !spec.wire->exact && spec.wire->granularity > 8 && !spec.wire->masks);
}

struct Case {
  std::string spec;
  int world;
  Layout layout;
  Poison poison;
};

void expect_contained(Device device, const Case& c) {
  SCOPED_TRACE(fmt::format("{} on {} ranks, {}: {} in {} elements of tensor {} from {}, rank {}", c.spec,
                           c.world, kLayouts[static_cast<int>(c.layout)], c.poison.value,
                           c.poison.elements.size(), c.poison.tensor, c.poison.elements[0], c.poison.rank));
  const CompressionSpec spec = CompressionSpec::parse(c.spec);
  const Outcome clean = run(device, c.spec, c.world, c.layout, c.poison, true);
  const Outcome got = run(device, c.spec, c.world, c.layout, c.poison, false);
  const bool whole_tensor = spec.method != CompressionSpec::Method::wire;
  const double decay = static_cast<float>(spec.policy.decay);
  bool seen = false;
  for (size_t t = 0; t < got.gradient[0].size(); ++t) {
    const bool poisoned = static_cast<int>(t) == c.poison.tensor;
    double lost = 0, size = 0;
    for (size_t i = 0; i < got.gradient[0][t].size(); ++i) {
      const float mean = mean_of(got, c.layout, t, i);
      for (int r = 0; r < c.world; ++r) {
        ASSERT_TRUE(std::isfinite(got.residual[r][t][i])) << "tensor " << t << " element " << i;
        if (poisoned || shares(spec)) continue;
        ASSERT_EQ(std::bit_cast<uint32_t>(got.result[r][t][i]),
                  std::bit_cast<uint32_t>(clean.result[r][t][i]))
            << "result of rank " << r << ", tensor " << t << " element " << i;
        ASSERT_EQ(std::bit_cast<uint32_t>(got.residual[r][t][i]),
                  std::bit_cast<uint32_t>(clean.residual[r][t][i]))
            << "residual of rank " << r << ", tensor " << t << " element " << i;
      }
      const bool bad = poisoned && std::ranges::find(c.poison.elements, i) != c.poison.elements.end();
      if (poisoned && !std::isfinite(mean)) seen = true;
      if (bad || (poisoned && whole_tensor)) continue;
      ASSERT_TRUE(std::isfinite(mean)) << "tensor " << t << " element " << i;
      double difference = double{mean} * c.world;
      for (int r = 0; r < c.world; ++r) {
        const double in = double{got.gradient[r][t][i]} + decay * double{got.before[r][t][i]};
        difference += got.residual[r][t][i] - in;
        size += in * in;
      }
      lost += difference * difference;
    }
    if (spec.residual->exact) {
      ASSERT_LE(std::sqrt(lost), 1e-6 * std::sqrt(size)) << "lost from tensor " << t;
    }
  }
  EXPECT_TRUE(seen) << "the result does not show it";
}

std::vector<std::string> all_specs() {
  std::vector<std::string> all;
  for (Wire wire : example_wire_formats()) {
    CompressionSpec spec;
    spec.wire = wire;
    spec.rounding = wire->rounding;
    if (spec.divergence().empty())
      all.push_back(wire->spec() + (*wire->options != 0 ? "," : ":") + "dense=off");
    if (wire->exact) all.back() = "fp32";
  }
  for (const std::string& spec : example_specs()) all.push_back(spec);
  for (Wire wire : wire_formats()) {
    if (wire->exact) continue;
    for (const char* codec : {"powersgd:rank=2,alternate=on,wire=", "randk:ratio=0.2,wire="}) {
      all.push_back(codec + std::string(wire->name));
      if (wire->masks || wire->name == std::string("int8")) {
        const auto options = wire->copy()->choices();
        if (std::ranges::any_of(options, [](auto& o) { return o.key == std::string("rotate"); })) {
          all.push_back(all.back() + ",rotate=hadamard");
        }
      }
    }
  }
  return all;
}

class Containment : public ::testing::TestWithParam<Device> {};

// Rotates through schedules, worlds, layouts, positions and values for each spec. GRADWIRE_FULL_SWEEPS=1
// tests more combinations.
TEST_P(Containment, NonFiniteGradientsChangeNoOtherTensor) {
  const std::vector<std::string> schedules = schedule_names();
  const auto shapes = tensors();
  size_t turn = 0, cases = 0;
  for (const std::string& spec : thinned(all_specs(), 12)) {
    const bool wire = CompressionSpec::parse(spec).method == CompressionSpec::Method::wire;
    for (size_t k = 0; k < (full_sweeps() ? 24 : 2); ++k, ++turn) {
      const auto layout = static_cast<Layout>(turn % (wire ? 3 : 2));
      std::string schedule = schedules[turn % schedules.size()];
      if (layout == Layout::sharded && schedule == "tree") schedule = "ring";  // ranks that own nothing
      Case c{.spec = spec + (spec.find(':') == std::string::npos ? ":" : ",") + "schedule=" + schedule,
             .world = 2 + static_cast<int>(turn / schedules.size() % 3),
             .layout = layout,
             .poison = {}};
      Poison& p = c.poison;
      p.tensor = static_cast<int>(turn * 5 % shapes.size());
      if (spec.starts_with("randk") || spec.find("dense=off") == std::string::npos)
        p.tensor = k % 2 == 0 ? 2 : 5;
      p.rank = static_cast<int>(turn % static_cast<size_t>(c.world));
      p.value = turn % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                              : (turn % 4 == 1 ? 1.0f : -1.0f) * std::numeric_limits<float>::infinity();
      const auto count = static_cast<size_t>(shapes[p.tensor].count());
      switch (turn / 2 % 4) {
        case 0:
          p.elements = {0};
          break;
        case 1:
          p.elements = {count - 1};
          break;
        case 2:
          p.elements = {count / 2};
          break;
        default:
          for (size_t i = 0; i < count; ++i) p.elements.push_back(i);
      }
      expect_contained(GetParam(), c);
      if (HasFatalFailure()) return;
      ++cases;
    }
  }
  RecordProperty("cases", static_cast<int>(cases));
}

// Expects residuals of tensor ends and of dense tensors to be sent. A state from another layout may have such
// residuals, although both are averaged separately in FP32.
TEST_P(Containment, SendsLoadedResidualsOfTensorEndsAndDenseTensors) {
  constexpr int kWorld = 2, kSteps = 2;
  for (const std::string spec : {"int8", "int8:residual=int8", "int4", "int4:residual=bf16", "mxfp8",
                                 "mxfp8:residual=bf16", "mxfp8:residual=int8", "nvfp4:residual=int8",
                                 "powersgd:rank=2", "powersgd:rank=2,wire=int8,residual=bf16"}) {
    SCOPED_TRACE(spec);
    std::vector<std::vector<float>> before(kWorld), after(kWorld);
    std::vector<double> applied;
    double kept = 0;
    run_ranks(kWorld, GetParam(), [&](Communicator& comm) {
      const auto r = static_cast<size_t>(comm.rank());
      Rank rank(comm, spec, tensors(), 1 << 20);
      std::vector<std::vector<float>> zeros;
      for (const GradientTensor& t : rank.tensors) zeros.emplace_back(static_cast<size_t>(t.count()), 0.0f);
      rank.step(zeros);
      uint32_t seed = 10 * static_cast<uint32_t>(r);
      for (const TensorState& s : rank.reducer.tensor_state()) {
        if (s.kind != kResidualKind) continue;
        const std::vector<float> loaded = normal(s.count(), ++seed);
        s.write(rank.stream, 0, std::as_bytes(std::span(loaded)));
        rank.stream.synchronize();
      }
      before[r] = rank.residual();
      std::vector<double> sum(before[r].size(), 0.0);
      for (int step = 0; step < kSteps; ++step) {
        const std::vector<float> mean = rank.step(zeros);
        for (size_t i = 0; i < mean.size(); ++i) sum[i] += mean[i];
      }
      after[r] = rank.residual();
      if (r == 0) applied = sum, kept = kSteps * kWorld * squared_norm(before[r]);
    });
    std::vector<double> difference(applied.size());
    for (size_t i = 0; i < applied.size(); ++i) {
      difference[i] = kWorld * applied[i];
      for (int r = 0; r < kWorld; ++r) difference[i] += double{after[r][i]} - before[r][i];
    }
    const bool rounded = !CompressionSpec::parse(spec).residual->exact;
    EXPECT_LE(norm(difference), 1e-5 * std::sqrt(kept) + (rounded ? kept_rounding(spec, kept) : 0.0));
  }
}

GW_INSTANTIATE_ON_DEVICES(Containment);

}  // namespace containment
}  // namespace
}  // namespace gradwire::testing
