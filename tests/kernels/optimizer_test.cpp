#include "kernels/passes/passes.h"

#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

// The state of one optimizer. `m` is the first moment or SGD's velocity.
struct State {
  Array<float> params, m, v, grads;
  Array<OptimizerScalars> scalars;
  int64_t count;

  State(OpFixture& test, int64_t n, const std::vector<float>& v_values, int64_t misalign = 0)
      : params(test.array(normal(n, 1), misalign)),
        m(test.array(std::vector<float>(v_values.size()), misalign)),
        v(test.array(v_values, misalign)),
        grads(test.array<float>(n, misalign)),
        scalars(test.array<OptimizerScalars>(1)),
        count(n) {}
  ~State() {
    for (const auto* x : {&params, &m, &v, &grads}) x->expect_guards_intact("optimizer's array");
  }
  void set(const std::vector<float>& gradients, const OptimizerScalars& step) {
    grads.set(gradients);
    scalars.set({step});
  }
  SgdStep sgd(bool with_momentum) const {
    return {.params = params.data(),
            .grads = grads.data(),
            .velocity = with_momentum ? m.data() : nullptr,
            .count = count,
            .momentum = with_momentum ? 0.9f : 0.0f,
            .weight_decay = 0.01f,
            .scalars = scalars.data()};
  }
  AdamWStep adamw() const {
    return {.params = params.data(),
            .grads = grads.data(),
            .m = m.data(),
            .v = v.data(),
            .count = count,
            .beta2 = 0.99f,
            .weight_decay = 0.05f,
            .scalars = scalars.data()};
  }
};

std::vector<float> zeros(int64_t n) {
  return std::vector<float>(static_cast<size_t>(n), 0.0f);
}

class Optimizer : public OpTest {
 public:
  // Expects an array to match the formula evaluated in double.
  static void expect_formula(const Array<float>& x, const std::vector<double>& want, const char* what,
                             double tolerance = 1e-6, double scale = 1.0) {
    expect_close(x.host(), {want.begin(), want.end()}, tolerance, what, scale);
  }
};

TEST_P(Optimizer, SgdMatchesPyTorchOverSeveralSteps) {
  for (int64_t n : awkward_sizes()) {
    for (bool with_momentum : {false, true}) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{}{}", n, with_momentum ? " with momentum" : ""));
        State s(*this, n, zeros(n), misalign);
        const auto start = s.params.host();
        std::vector<double> w(start.begin(), start.end()), v(w.size(), 0.0);
        for (uint32_t step = 0; step < 5; ++step) {
          const auto g = normal(n, 10 + step);
          const float lr = 0.1f / static_cast<float>(step + 1);
          s.set(g, {.lr = lr});
          GW_RUN(sgd_step, s.sgd(with_momentum));
          for (size_t i = 0; i < w.size(); ++i) {
            v[i] = double{with_momentum ? 0.9f : 0.0f} * v[i] + (g[i] + double{0.01f} * w[i]);
            w[i] -= lr * v[i];
          }
        }
        expect_formula(s.params, w, "params");
        if (with_momentum) expect_formula(s.m, v, "velocity");
      }
    }
  }
}

TEST_P(Optimizer, AdamWMatchesPyTorchOverSeveralSteps) {
  for (int64_t n : awkward_sizes()) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(n);
      const double b1 = 0.9f, b2 = 0.99f, eps = 1e-8f, decay = 0.05f;
      State s(*this, n, zeros(n), misalign);
      const auto start = s.params.host();
      std::vector<double> w(start.begin(), start.end()), m(w.size(), 0.0), v(w.size(), 0.0);
      for (uint32_t step = 1; step <= 5; ++step) {
        auto g = normal(n, 20 + step, 0.1f);
        // zero gradients must not cause a division by zero
        for (size_t i = 0; i < w.size(); i += 3) g[i] = 0.0f;
        const OptimizerScalars scalars{.lr = 0.01f,
                                       .correction1 = static_cast<float>(1.0 - std::pow(b1, step)),
                                       .correction2 = static_cast<float>(1.0 - std::pow(b2, step))};
        s.set(g, scalars);
        GW_RUN(adamw_step, s.adamw());
        for (size_t i = 0; i < w.size(); ++i) {
          w[i] *= 1.0 - scalars.lr * decay;
          m[i] = b1 * m[i] + (1.0 - b1) * g[i];
          v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
          w[i] -= scalars.lr / double{scalars.correction1} * m[i] /
                  (std::sqrt(v[i]) / std::sqrt(double{scalars.correction2}) + eps);
        }
      }
      expect_formula(s.params, w, "params");
      expect_formula(s.m, m, "m", 1e-6, 0.1);
      expect_formula(s.v, v, "v", 2e-6, 0.01);
    }
  }
}

TEST_P(Optimizer, AlsoWritesTheNewParametersAsBf16) {
  for (int64_t n : awkward_sizes()) {
    // 0: vectors only; 1: no vectors; 4: the BF16 copy is aligned to 8 bytes
    for (int64_t misalign : {0, 1, 4}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", n, misalign));
      State s(*this, n, std::vector<float>(static_cast<size_t>(n), 0.25f));
      s.set(normal(n, 2), {.lr = 0.1f, .correction1 = 0.5f, .correction2 = 0.5f});
      Operand<Bf16> rounded(*this, n, misalign);
      SgdStep sgd = s.sgd(false);
      sgd.rounded = rounded.device.data();
      GW_RUN(sgd_step, sgd);
      expect_same_bits(rounded.got(), widened(narrowed<Bf16>(s.params.host())), "after SGD");
      AdamWStep adamw = s.adamw();
      adamw.rounded = rounded.device.data();
      GW_RUN(adamw_step, adamw);
      expect_same_bits(rounded.got(), widened(narrowed<Bf16>(s.params.host())), "after AdamW");
    }
  }
}

TEST_P(Optimizer, NanGradientReachesOnlyItsParameter) {
  State s(*this, 70, zeros(70));
  auto g = normal(70, 2);
  g[33] = std::numeric_limits<float>::quiet_NaN();
  s.set(g, {.lr = 0.1f});
  const AdamWStep args = s.adamw();
  GW_RUN(adamw_step, args);
  const auto got = s.params.host();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i == 33) << i;
}

TEST_P(Optimizer, AnyNumberOfThreadsGivesTheSameBits) {
  const int64_t n = 100003;
  expect_same_bits_with_any_threads([&] {
    State s(*this, n, std::vector<float>(static_cast<size_t>(n), 0.5f));
    s.set(normal(n, 2), {.lr = 0.1f, .correction1 = 0.1f, .correction2 = 0.2f});
    const AdamWStep args = s.adamw();
    GW_RUN(adamw_step, args);
    return Arrays{s.params.host()};
  });
}

GW_INSTANTIATE_BACKENDS(Optimizer);

}  // namespace
}  // namespace gradwire::testing
