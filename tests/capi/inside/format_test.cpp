// Tests registered wire formats below the C ABI: ops, the table of formats, every schedule, error feedback.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "collectives/program/program.h"
#include "collectives/spec/spec.h"
#include "kernels/wire/registered.h"
#include "runtime/util/error.h"
#include "tests/collectives/conservation.h"
#include "tests/kernels/wire_problem.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

// Registers `name` with the arithmetic of a built-in format, rounding to nearest. Returns the new format.
Wire register_twin(const std::string& name, const std::string& spec) {
  const Wire own = wire_format(spec);
  FormatCallbacks callbacks;
  callbacks.user = const_cast<WireFormat*>(own);
  callbacks.encode = [](void* user, const float* values, int64_t blocks, uint8_t* bytes) -> const char* {
    const auto* format = static_cast<const WireFormat*>(user);
    const int64_t count = blocks * format->granularity;
    std::vector<uint64_t> aligned(static_cast<size_t>(format->bytes(count) + 7) / 8);
    format->reduce_encode(Stream::immediate_host(), {.own = values, .wire = aligned.data(), .count = count});
    std::memcpy(bytes, aligned.data(), static_cast<size_t>(format->bytes(count)));
    return nullptr;
  };
  callbacks.decode = [](void* user, const uint8_t* bytes, int64_t blocks, float* values) -> const char* {
    const auto* format = static_cast<const WireFormat*>(user);
    const int64_t count = blocks * format->granularity;
    std::vector<uint64_t> aligned(static_cast<size_t>(format->bytes(count) + 7) / 8);
    std::memcpy(aligned.data(), bytes, static_cast<size_t>(format->bytes(count)));
    format->decode(Stream::immediate_host(), {.wire = aligned.data(), .out = values, .count = count});
    return nullptr;
  };
  register_wire_format(name, own->granularity, own->bytes(own->granularity), callbacks);
  return find_wire_format(name);
}

// A coarse format without a built-in twin: stores the largest of five values, and the value's index.
constexpr int64_t kCoarseBlock = 5;
const char* encode_coarse(void*, const float* values, int64_t blocks, uint8_t* bytes) {
  for (int64_t b = 0; b < blocks; ++b, values += kCoarseBlock, bytes += sizeof(float) + 1) {
    int largest = 0;
    for (int i = 1; i < kCoarseBlock; ++i) {
      if (std::abs(values[i]) > std::abs(values[largest])) largest = i;
    }
    std::memcpy(bytes, &values[largest], sizeof(float));
    bytes[sizeof(float)] = static_cast<uint8_t>(largest);
  }
  return nullptr;
}
const char* decode_coarse(void*, const uint8_t* bytes, int64_t blocks, float* values) {
  for (int64_t b = 0; b < blocks; ++b, values += kCoarseBlock, bytes += sizeof(float) + 1) {
    for (int i = 0; i < kCoarseBlock; ++i) values[i] = 0.0f;
    std::memcpy(&values[bytes[sizeof(float)]], bytes, sizeof(float));
  }
  return nullptr;
}
Wire coarse() {
  register_wire_format("coarse", kCoarseBlock, sizeof(float) + 1,
                       {.encode = encode_coarse, .decode = decode_coarse});
  return find_wire_format("coarse");
}

class RegisteredFormat : public ::testing::Test, public WireFixture {
 public:
  RegisteredFormat() : WireFixture({"host", Device::host()}) {}
};

TEST_F(RegisteredFormat, HasTheBitsOfABuiltInOneWithItsArithmetic) {
  const std::pair<const char*, const char*> twins[] = {{"twin_int8", "int8:scale=fp32"},
                                                       {"twin_int4", "int4:block=64,rotate=hadamard"}};
  for (const auto& [name, spec] : twins) {
    const Wire own = wire_format(spec), twin = register_twin(name, spec);
    ASSERT_NE(twin, nullptr);
    uint32_t seed = 0;
    for (int64_t n : {0, 1, 7, 63, 64, 65, 129, 1025, 4099, (1 << 20) + 77}) {
      for (int variant = 0; variant < 8; ++variant) {
        const int num_inputs = variant % 4;
        WireProblem p{.own = spread_values(n, ++seed, variant < 4 ? 1.0f : 12.0f), .residual = {}};
        if (variant % 2 == 0) p.residual = spread_values(n, ++seed, 1.0f);
        for (int k = 0; k < num_inputs; ++k) {
          p.inputs.push_back(reference_encoded(own, spread_values(n, ++seed, 2.0f)));
        }
        p.own_position = variant % (num_inputs + 1);
        p.wire = variant != 6;
        p.in_place = variant == 5;
        if (n > 1000) p.own[n / 2] = variant % 3 == 0 ? kInf : kNan;
        SCOPED_TRACE(fmt::format("{} n {} variant {}", spec, n, variant));
        const WireResult got = run(twin, p);
        ASSERT_EQ(static_cast<int64_t>(got.wire.size()), own->bytes(n));
        expect_same_result(own, p, got, reference_result(own, p));
        if (p.wire) {
          expect_same_floats(decoded(twin, got.wire, n, 0.3f), reference_decoded(own, got.wire, n, 0.3f),
                             "decoded");
        }
        if (HasFailure()) return;
        if (n > (1 << 20)) break;
      }
    }
  }
}

TEST_F(RegisteredFormat, ResidualsKeepWhatAFormatLosesAndNothingThatIsNotFinite) {
  // Decodes 1 to 0, 2 to NaN, FLT_MAX to -FLT_MAX, and any other value to itself.
  const auto copy = [](void*, const float* v, int64_t blocks, uint8_t* b) -> const char* {
    std::memcpy(b, v, static_cast<size_t>(blocks) * sizeof(float));
    return nullptr;
  };
  const auto back = [](void*, const uint8_t* b, int64_t blocks, float* v) -> const char* {
    std::memcpy(v, b, static_cast<size_t>(blocks) * sizeof(float));
    for (int64_t i = 0; i < blocks; ++i) {
      v[i] = v[i] == 1.0f ? 0.0f : v[i] == 2.0f ? kNan : v[i] == FLT_MAX ? -FLT_MAX : v[i];
    }
    return nullptr;
  };
  register_wire_format("odd_one", 1, sizeof(float), {.encode = copy, .decode = back});
  const WireResult got =
      run(find_wire_format("odd_one"), {.own = {0.5f, 1.0f, 2.0f, FLT_MAX, kInf, kNan, 1.5f},
                                        .residual = {0.25f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, kNan},
                                        .out_scale = 1});
  expect_same_floats(got.residual, {0.0f, 1.0f, 2.0f, FLT_MAX, 0.0f, 0.0f, 0.0f}, "residual");
  expect_same_floats(got.out, {0.75f, 0.0f, kNan, -FLT_MAX, kInf, kNan, kNan}, "out");
}

TEST_F(RegisteredFormat, LosesNothingInAnyScheduleAndKeepsRanksIdentical) {
  coarse();
  register_twin("twin_int2", "int2");
#ifdef GRADWIRE_SANITIZED
  constexpr int kSteps = 3;
#else
  constexpr int kSteps = 12;
#endif
  for (const char* spec : {"coarse", "twin_int2", "powersgd:rank=2,wire=coarse"}) {
    for (const std::string& schedule : schedule_names()) {
      for (int world : {1, 2, 3, 4, 8}) {
        const std::string all =
            fmt::format("{}{}schedule={}", spec, std::strchr(spec, ':') != nullptr ? "," : ":", schedule);
        SCOPED_TRACE(fmt::format("{}, world of {}", all, world));
        expect_conservation(Device::host(), all, world, world <= 4 ? kSteps : 5);
      }
    }
  }
}

TEST_F(RegisteredFormat, AHardGradientIsSeenOnceAndContained) {
  coarse();
  for (float poison : {kNan, kInf, -kInf, 1e38f, 1e-45f}) {
    for (const char* spec : {"coarse:schedule=ring", "coarse:schedule=two_shot"}) {
      run_ranks(3, Device::host(), [&](Communicator& comm) {
        Rank rank(comm, spec, model(), 1 << 20);
        for (int s = 0; s < 4; ++s) {
          auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 3 + comm.rank()));
          if (s == 1 && comm.rank() == 1) gradients[1][5] = poison;
          int bad = 0;
          for (float v : rank.step(gradients)) bad += is_finite(v) ? 0 : 1;
          // Infinity is the largest value of its block and is sent unchanged. A comparison with NaN is false,
          // so the NaN is not sent.
          EXPECT_LE(bad, s == 1 && !is_finite(poison) ? 1 : 0) << spec << " step " << s;
          if (s == 1 && std::isinf(poison)) {
            EXPECT_EQ(bad, 1) << spec;
          }
          for (float v : rank.residual()) ASSERT_TRUE(is_finite(v)) << spec << " step " << s;
        }
      });
    }
  }
}

TEST(RegisteredFormats, TheTableCanBeReadWhileItGrows) {
  constexpr int kFormats = 200;
  const auto before = wire_formats();
  std::atomic<bool> done{false};
  std::thread reader([&] {
    size_t last = 0;
    while (!done) {
      const auto formats = wire_formats();
      ASSERT_GE(formats.size(), last);
      last = formats.size();
      for (Wire format : formats) ASSERT_EQ(find_wire_format(format->name), format);
      for (Wire format : before) ASSERT_GT(format->bytes(1000), 0);
      EXPECT_EQ(CompressionSpec::parse("int8").wire, wire_format("int8"));
    }
  });
  std::vector<std::thread> writers;
  for (int half = 0; half < 2; ++half) {
    writers.emplace_back([&, half] {
      for (int i = half * kFormats / 4; i < kFormats / 2 + half * kFormats / 4; ++i) {
        register_wire_format(fmt::format("many_{}", i), kCoarseBlock, sizeof(float) + 1,
                             {.encode = encode_coarse, .decode = decode_coarse});
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(wire_formats().size(), before.size() + 3 * kFormats / 4)
      << "the writers had some names in common";
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(wire_formats()[i], before[i]);
}

// Wraps the host's transport and reports a GPU as its device.
class OnCuda final : public Transport {
 public:
  OnCuda() : Transport("none", {0, 2, Device::cuda(0)}) {}
  void begin_call(const Stream&, const Call&) override {}
  void exchange(const Stream&, const std::vector<Transfer>&, const ExchangeLabel&) override {}
  void barrier() override {}
  void abort(const std::string&) override {}
  void check() override {}
};

TEST(RegisteredFormats, AreRefusedOnAGpuBeforeAnythingIsSent) {
  OnCuda transport;
  float value = 0;
  try {
    Program(transport, ring(2), {.in = &value, .out = &value, .count = 1},
            {.what = "the sum", .wire = coarse()});
    FAIL() << "a program for callbacks on a GPU";
  } catch (const BadInput& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "the sum: wire format 'coarse' was registered with callbacks for the host, and the communicator is "
        "on cuda:0");
  }
}

}  // namespace
}  // namespace gradwire::testing
