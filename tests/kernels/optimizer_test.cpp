#include "kernels/optimizer/optimizer.h"

#include <fmt/format.h>

#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

class Optimizer : public OpTest {};

TEST_P(Optimizer, SgdMatchesPyTorchOverSeveralSteps) {
  for (int64_t n : awkward_sizes()) {
    for (bool with_momentum : {false, true}) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{}{}", n, with_momentum ? " with momentum" : ""));
        const float momentum = with_momentum ? 0.9f : 0.0f, decay = 0.01f;
        auto start = normal(n, 1);
        std::vector<double> w(start.begin(), start.end()), v(start.size(), 0.0);
        auto params = array(start, misalign),
             velocity = array(std::vector<float>(start.size(), 0.0f), misalign);
        for (uint32_t step = 0; step < 5; ++step) {
          OptimizerScalars scalars{.lr = 0.1f / static_cast<float>(step + 1)};
          auto g = normal(n, 10 + step);
          for (size_t i = 0; i < w.size(); ++i) {
            v[i] = static_cast<double>(momentum) * v[i] + (g[i] + static_cast<double>(decay) * w[i]);
            w[i] -= scalars.lr * v[i];
          }
          auto grads = array(g, misalign);
          auto device_scalars = array(std::vector<OptimizerScalars>{scalars});
          SgdStep args{.params = params.data(),
                       .grads = grads.data(),
                       .velocity = with_momentum ? velocity.data() : nullptr,
                       .count = n,
                       .momentum = momentum,
                       .weight_decay = decay,
                       .scalars = device_scalars.data()};
          GW_RUN(sgd_step, args);
        }
        params.expect_guards_intact("params");
        velocity.expect_guards_intact("velocity");
        expect_close(params.host(), {w.begin(), w.end()}, 1e-6, "params");
        if (with_momentum) expect_close(velocity.host(), {v.begin(), v.end()}, 1e-6, "velocity");
      }
    }
  }
}

TEST_P(Optimizer, AdamWMatchesPyTorchOverSeveralSteps) {
  for (int64_t n : awkward_sizes()) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(n);
      const float b1 = 0.9f, b2 = 0.99f, eps = 1e-8f, decay = 0.05f;
      auto start = normal(n, 2);
      std::vector<double> w(start.begin(), start.end()), m(start.size(), 0.0), v(start.size(), 0.0);
      std::vector<float> zero(start.size(), 0.0f);
      auto params = array(start, misalign), first = array(zero, misalign), second = array(zero, misalign);
      for (uint32_t step = 1; step <= 5; ++step) {
        OptimizerScalars scalars{
            .lr = 0.01f,
            .correction1 = static_cast<float>(1.0 - std::pow(static_cast<double>(b1), step)),
            .correction2 = static_cast<float>(1.0 - std::pow(static_cast<double>(b2), step))};
        auto g = normal(n, 20 + step, 0.1f);
        for (size_t i = 0; i < w.size(); i += 3) g[i] = 0.0f;  // a zero gradient must not divide by zero
        for (size_t i = 0; i < w.size(); ++i) {
          w[i] *= 1.0 - static_cast<double>(scalars.lr) * decay;
          m[i] = static_cast<double>(b1) * m[i] + (1.0 - static_cast<double>(b1)) * g[i];
          v[i] = static_cast<double>(b2) * v[i] + (1.0 - static_cast<double>(b2)) * g[i] * g[i];
          w[i] -= scalars.lr / static_cast<double>(scalars.correction1) * m[i] /
                  (std::sqrt(v[i]) / std::sqrt(static_cast<double>(scalars.correction2)) + eps);
        }
        auto grads = array(g, misalign);
        auto device_scalars = array(std::vector<OptimizerScalars>{scalars});
        AdamWStep args{.params = params.data(),
                       .grads = grads.data(),
                       .m = first.data(),
                       .v = second.data(),
                       .count = n,
                       .beta1 = b1,
                       .beta2 = b2,
                       .eps = eps,
                       .weight_decay = decay,
                       .scalars = device_scalars.data()};
        GW_RUN(adamw_step, args);
      }
      params.expect_guards_intact("params");
      first.expect_guards_intact("m");
      second.expect_guards_intact("v");
      expect_close(params.host(), {w.begin(), w.end()}, 1e-6, "params");
      expect_close(first.host(), {m.begin(), m.end()}, 1e-6, "m", 0.1);
      expect_close(second.host(), {v.begin(), v.end()}, 2e-6, "v", 0.01);
    }
  }
}

TEST_P(Optimizer, AlsoWritesTheNewParametersAsBf16) {
  for (int64_t n : awkward_sizes()) {
    for (int64_t misalign : {0, 1, 4}) {  // vectors only, none, and those of the copy at 8 bytes
      SCOPED_TRACE(fmt::format("{} misaligned by {}", n, misalign));
      const OptimizerScalars scalars{.lr = 0.1f, .correction1 = 0.5f, .correction2 = 0.5f};
      auto device_scalars = array(std::vector<OptimizerScalars>{scalars});
      auto grads = array(normal(n, 2)), params = array(normal(n, 1)), m = array(normal(n, 3)),
           v = array(normal(n, 4));
      auto rounded = array<Bf16>(n, misalign);
      auto expect_rounded = [&] {
        rounded.expect_guards_intact("rounded");
        const auto got = rounded.host();
        const auto want = params.host();
        for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i].bits, narrow<Bf16>(want[i]).bits) << i;
      };
      SgdStep sgd{.params = params.data(),
                  .grads = grads.data(),
                  .count = n,
                  .scalars = device_scalars.data(),
                  .rounded = rounded.data()};
      GW_RUN(sgd_step, sgd);
      expect_rounded();
      std::vector<float> squares(static_cast<size_t>(n), 0.25f);
      v.set(squares);
      AdamWStep adamw{.params = params.data(),
                      .grads = grads.data(),
                      .m = m.data(),
                      .v = v.data(),
                      .count = n,
                      .scalars = device_scalars.data(),
                      .rounded = rounded.data()};
      GW_RUN(adamw_step, adamw);
      expect_rounded();
    }
  }
}

TEST_P(Optimizer, OpsMatchTheReferences) {
  const int64_t n = 1000;
  auto w = normal(n, 1), g = normal(n, 2), m = normal(n, 3), v = normal(n, 4);
  for (float& x : v) x = x * x;
  OptimizerScalars scalars{.lr = 0.02f, .correction1 = 0.4f, .correction2 = 0.3f};
  auto d_scalars = array(std::vector<OptimizerScalars>{scalars});
  {
    auto dw = array(w), dg = array(g), dv = array(v);
    SgdStep args{.params = dw.data(),
                 .grads = dg.data(),
                 .velocity = dv.data(),
                 .count = n,
                 .momentum = 0.8f,
                 .weight_decay = 0.1f,
                 .scalars = d_scalars.data()};
    GW_RUN(sgd_step, args);
    auto rw = w, rv = v;
    args.params = rw.data(), args.grads = g.data(), args.velocity = rv.data(), args.scalars = &scalars;
    reference::sgd_step(args);
    expect_close(dw.host(), rw, 3e-7, "params");
    expect_close(dv.host(), rv, 3e-7, "velocity");
  }
  auto dw = array(w), dg = array(g), dm = array(m), dv = array(v);
  AdamWStep args{.params = dw.data(),
                 .grads = dg.data(),
                 .m = dm.data(),
                 .v = dv.data(),
                 .count = n,
                 .scalars = d_scalars.data()};
  GW_RUN(adamw_step, args);
  auto rw = w, rm = m, rv = v;
  args.params = rw.data(), args.grads = g.data(), args.m = rm.data(), args.v = rv.data(),
  args.scalars = &scalars;
  reference::adamw_step(args);
  expect_close(dw.host(), rw, 1e-6, "params");
  expect_close(dm.host(), rm, 3e-7, "m");
  expect_close(dv.host(), rv, 3e-7, "v");
}

TEST_P(Optimizer, NanGradientReachesOnlyItsParameter) {
  const int64_t n = 70;
  auto g = normal(n, 1);
  g[33] = std::numeric_limits<float>::quiet_NaN();
  auto params = array(normal(n, 2)), grads = array(g), m = array(std::vector<float>(70, 0.0f)),
       v = array(std::vector<float>(70, 0.0f));
  auto scalars = array(std::vector<OptimizerScalars>{{.lr = 0.1f}});
  AdamWStep args{.params = params.data(),
                 .grads = grads.data(),
                 .m = m.data(),
                 .v = v.data(),
                 .count = n,
                 .scalars = scalars.data()};
  GW_RUN(adamw_step, args);
  auto got = params.host();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i == 33) << i;
}

TEST_P(Optimizer, AnyNumberOfThreadsGivesTheSameBits) {
  const int64_t n = 100003;
  auto w = normal(n, 1), g = normal(n, 2), m = normal(n, 3);
  std::vector<float> v(w.size(), 0.5f);
  auto scalars = array(std::vector<OptimizerScalars>{{.lr = 0.1f, .correction1 = 0.1f, .correction2 = 0.2f}});
  const int before = host_threads();
  std::vector<float> first;
  auto counts = thread_counts();
  counts.insert(counts.begin(), before);
  for (int threads : counts) {
    set_host_threads(threads);
    auto dw = array(w), dg = array(g), dm = array(m), dv = array(v);
    AdamWStep args{.params = dw.data(),
                   .grads = dg.data(),
                   .m = dm.data(),
                   .v = dv.data(),
                   .count = n,
                   .scalars = scalars.data()};
    GW_RUN(adamw_step, args);
    if (first.empty()) first = dw.host();
    expect_same_bits(dw.host(), first, "params");
  }
  set_host_threads(before);
}

GW_INSTANTIATE_BACKENDS(Optimizer);

}  // namespace
}  // namespace gradwire::testing
