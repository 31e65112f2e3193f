// Tests gw_format_register(): wire formats of the calling program, and errors of broken formats.
#include <barrier>
#include <cmath>

#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

using capi::Model;
using capi::normal;
using capi::run_ranks;

// A format that stores 8-bit codes and their unit for each block of 40 values. A callback misbehaves for
// blocks whose first value exceeds kTrigger or, if Own::always is set, for all blocks.
constexpr int64_t kBlock = 40, kBytes = kBlock + sizeof(float);
constexpr float kTrigger = 1000.0f;
struct Own {
  enum Trouble { none, error, beyond, before, missing };
  Trouble encode = none, decode = none;
  bool always = false;
  std::atomic<int> blocks{0};
};

const char* encode(void* user, const float* values, int64_t blocks, uint8_t* bytes) {
  auto& own = *static_cast<Own*>(user);
  own.blocks += static_cast<int>(blocks);
  for (int64_t b = 0; b < blocks; ++b, values += kBlock, bytes += kBytes) {
    float largest = 0;
    for (int i = 0; i < kBlock; ++i) largest = std::fmax(largest, std::fabs(values[i]));
    const float unit = largest / 127;
    std::memcpy(bytes + kBlock, &unit, sizeof unit);
    for (int i = 0; i < kBlock; ++i) {
      const float code = unit > 0 && std::isfinite(unit) ? std::nearbyint(values[i] / unit) : 0;
      bytes[i] = static_cast<uint8_t>(static_cast<int8_t>(code == code ? code : 0));
    }
    if (!own.always && !(values[0] > kTrigger)) continue;
    if (own.encode == Own::error) return "out of cheese";
    if (own.encode == Own::beyond) bytes[(blocks - b) * kBytes] = 1;
    if (own.encode == Own::before) bytes[-b * kBytes - 1] = 1;
  }
  return nullptr;
}

// Encodes as encode(), but leaves byte 7 of each block unchanged.
const char* encode_less(void* user, const float* values, int64_t blocks, uint8_t* bytes) {
  std::vector<uint8_t> before(bytes, bytes + blocks * kBytes);
  encode(user, values, blocks, bytes);
  for (int64_t b = 0; b < blocks; ++b) bytes[b * kBytes + 7] = before[b * kBytes + 7];
  return nullptr;
}

const char* decode(void* user, const uint8_t* bytes, int64_t blocks, float* values) {
  auto& own = *static_cast<Own*>(user);
  for (int64_t b = 0; b < blocks; ++b, values += kBlock, bytes += kBytes) {
    float unit = 0;
    std::memcpy(&unit, bytes + kBlock, sizeof unit);
    for (int i = 0; i < kBlock; ++i) {
      if (own.decode != Own::missing || i + 1 < kBlock) values[i] = unit * static_cast<int8_t>(bytes[i]);
    }
    if (!own.always && !(values[0] > kTrigger)) continue;
    if (own.decode == Own::error) return "cannot read this";
    if (own.decode == Own::beyond) values[(blocks - b) * kBlock] = 1;
  }
  return nullptr;
}

gw_format format(const char* name, Own* own) {
  auto f = capi::sized<gw_format>();
  f.name = name;
  f.block = kBlock;
  f.bytes = kBytes;
  f.encode = encode;
  f.decode = decode;
  f.user = own;
  return f;
}

TEST(CApiFormat, RegistrationChecksEveryArgumentAndNamesTheFormat) {
  static Own own;
  auto refused = [&](const char* part, auto change) {
    gw_format f = format("refused", &own);
    change(f);
    GW_EXPECT_BAD(part, gw_format_register(&f));
    if (f.name != nullptr) {
      gradwire::testing::expect_has(gw_last_error(), {f.name});
    }
  };
  GW_EXPECT_BAD("format is null", gw_format_register(nullptr));
  refused("name is null", [](gw_format& f) { f.name = nullptr; });
  for (const char* name : {"", "a-b", "a:b", "a,b", "a b", "a=b", "\xc3\xa4"}) {
    refused("letters, digits and '_'", [&](gw_format& f) { f.name = name; });
  }
  const std::string long_name(65, 'x');
  refused("1 to 64 letters", [&](gw_format& f) { f.name = long_name.c_str(); });
  for (const char* name : {"fp32", "bf16", "fp8", "int8"}) {
    refused("one of Gradwire's own", [&](gw_format& f) { f.name = name; });
  }
  refused("a codec", [](gw_format& f) { f.name = "powersgd"; });
  for (int64_t block : {int64_t{0}, int64_t{-1}, int64_t{65537}, INT64_MAX}) {
    refused("block is", [&](gw_format& f) { f.block = block; });
  }
  for (int64_t bytes : {int64_t{0}, int64_t{-1}, int64_t{1048577}, INT64_MAX}) {
    refused("bytes is", [&](gw_format& f) { f.bytes = bytes; });
  }
  refused("encode is null", [](gw_format& f) { f.encode = nullptr; });
  refused("decode is null", [](gw_format& f) { f.decode = nullptr; });
  gw_format small = format("refused", &own);
  small.size = 8;
  GW_EXPECT_BAD("gw_format.size is 8", gw_format_register(&small));

  run_ranks(2, [](gw_comm comm, int) {
    float value = 1;
    GW_EXPECT_BAD("unknown method 'refused'", capi::sum(comm, value, "refused"));
  });
}

TEST(CApiFormat, CallbacksThatBreakTheirPromisesAreNoticedWhenRegistered) {
  auto refused = [&](const char* text, Own::Trouble in_encode, Own::Trouble in_decode, auto change) {
    static Own own;
    own.encode = in_encode;
    own.decode = in_decode;
    own.always = true;
    gw_format f = format("broken", &own);
    change(f);
    GW_EXPECT_BAD(std::string("wire format 'broken': ") + text, gw_format_register(&f));
  };
  auto as_it_is = [](gw_format&) {};
  refused("encode: out of cheese", Own::error, Own::none, as_it_is);
  refused("decode: cannot read this", Own::none, Own::error, as_it_is);
  refused("encode wrote outside", Own::beyond, Own::none, as_it_is);
  refused("encode wrote outside", Own::before, Own::none, as_it_is);
  refused("decode wrote outside", Own::none, Own::beyond, as_it_is);
  refused("decode of 4 blocks does not write value 39 of 160", Own::none, Own::missing, as_it_is);
  refused("encode of 4 blocks does not write byte 7 of 176", Own::none, Own::none,
          [](gw_format& f) { f.encode = encode_less; });
  // The registered sizes differ from the sizes that the callbacks use.
  refused("encode wrote outside", Own::none, Own::none, [](gw_format& f) { f.bytes = kBytes - 1; });
  refused("encode of 4 blocks does not write byte 176 of 180", Own::none, Own::none,
          [](gw_format& f) { f.bytes = kBytes + 1; });
  refused("decode wrote outside", Own::none, Own::none, [](gw_format& f) { f.block = kBlock - 1; });
}

TEST(CApiFormat, SumsOverItAreCloseAndTheSameOnAllRanksInEverySchedule) {
  static Own own;
  const gw_format f = format("codes_of_40", &own);
  GW_ASSERT_OK(gw_format_register(&f));
  for (const char* schedule : {"auto", "ring", "tree", "two_shot", "hierarchical"}) {
    for (int world : {1, 2, 3, 4}) {
      constexpr int kCount = 1003;
      std::vector<std::vector<float>> results(static_cast<size_t>(world)), inputs;
      for (int r = 0; r < world; ++r) inputs.push_back(normal(kCount, static_cast<unsigned>(r)));
      own.blocks = 0;
      const auto sum = [&](gw_comm comm, int rank) {
        auto values = inputs[rank];
        const std::string spec = std::string("codes_of_40:schedule=") + schedule;
        GW_ASSERT_OK(capi::sum(comm, values, spec));
        results[rank] = values;
      };
      capi::run_ranks_at(capi::fresh_name(), world, 60'000, sum, 1);
      EXPECT_EQ(own.blocks > 0, world > 1);
      for (const auto& result : results) EXPECT_EQ(result, results[0]) << schedule << " of " << world;
      double error = 0, size = 0;
      for (size_t i = 0; i < kCount; ++i) {
        double sum = 0;
        for (const auto& input : inputs) sum += input[i];
        error += (results[0][i] - sum) * (results[0][i] - sum);
        size += sum * sum;
      }
      EXPECT_LT(std::sqrt(error / size), 0.02) << schedule << " of " << world;
      EXPECT_EQ(error > 0, world > 1);
    }
  }
}

// Checks that a callback's failure ends the calls of other ranks before the deadline, which is longer than
// the test's time limit.
TEST(CApiFormat, AFailureInACallbackReachesEveryRankAtOnceAndIsFinal) {
  static Own own;
  const gw_format f = format("late", &own);
  GW_ASSERT_OK(gw_format_register(&f));
  struct Case {
    Own::Trouble encode, decode;
    const char* text;
  };
  for (const Case& c : {Case{Own::error, Own::none, "wire format 'late': encode: out of cheese"},
                        Case{Own::none, Own::error, "wire format 'late': decode: cannot read this"},
                        Case{Own::beyond, Own::none, "wire format 'late': encode wrote outside"},
                        Case{Own::none, Own::beyond, "wire format 'late': decode wrote outside"}}) {
    for (const char* spec : {"late:schedule=ring", "late:schedule=two_shot", "powersgd:rank=1,wire=late"}) {
      for (const bool stateless : {true, false}) {
        if (stateless && spec[0] == 'p') continue;
        own.encode = c.encode;
        own.decode = c.decode;
        std::barrier all_are_well(3);
        run_ranks(3, 3'600'000, [&](gw_comm comm, int rank) {
          const Model model;
          capi::Reducer reducer(comm, spec, model);
          auto step = [&](float scale) {
            auto values = normal(model.elements(), static_cast<unsigned>(rank));
            for (float& v : values) v = scale + std::fabs(v) * (rank == 1 ? scale : 1);
            if (!stateless) {
              return reducer.step(values);
            }
            return capi::sum(comm, values, spec);
          };
          GW_EXPECT_OK(step(1));
          all_are_well.arrive_and_wait();
          for (int again = 0; again < 2; ++again)
            GW_EXPECT_FAILS(GW_COMM_FAILED, c.text, step(100 * kTrigger));
          GW_EXPECT_FAILS(GW_COMM_FAILED, c.text, gw_comm_check(comm));
        });
        if (HasFailure()) FAIL() << c.text << " with " << spec << (stateless ? ", stateless" : "");
      }
    }
  }
}

TEST(CApiFormat, RegisteringAgainReplacesTheCallbacksAndKeepsTheSizes) {
  static Own first, second;
  gw_format f = format("twice", &first);
  GW_ASSERT_OK(gw_format_register(&f));
  run_ranks(2, [&](gw_comm comm, int rank) {
    float value = 1;
    auto sum = [&] { return capi::sum(comm, value, "twice"); };
    GW_ASSERT_OK(sum());
    gw_format again = format("twice", &second);
    if (rank == 0) {
      GW_ASSERT_OK(gw_format_register(&again));
    }
    GW_ASSERT_OK(capi::sum(comm, value));  // both ranks have passed the registration
    const int before = first.blocks;
    GW_ASSERT_OK(sum());
    GW_ASSERT_OK(capi::sum(comm, value));
    EXPECT_EQ(first.blocks, before);
    EXPECT_GT(second.blocks, 0);
    EXPECT_EQ(value, 16.0f);  // four sums over two ranks: 2^4
    again.block = 20;
    again.bytes = 24;
    GW_EXPECT_FAILS(
        GW_BAD_ARGUMENT,
        "'twice' is registered with blocks of 40 values in 44 bytes, which cannot become blocks of 20 "
        "values in 24 bytes",
        gw_format_register(&again));
  });
}

TEST(CApiFormat, AMisspelledNameIsSuggested) {
  static Own own;
  const gw_format f = format("sparkling", &own);
  GW_ASSERT_OK(gw_format_register(&f));
  run_ranks(1, [](gw_comm comm, int) {
    float value = 1;
    auto call = [&](const char* spec) { return capi::sum(comm, value, spec); };
    GW_EXPECT_BAD("did you mean 'sparkling'?", call("sparklign"));
    GW_EXPECT_BAD("sparkling has no option 'block'", call("sparkling:block=7"));
    GW_EXPECT_BAD("sparkling has no option 'round'", call("sparkling:round=stochastic"));
  });
}

// Rejects calls from a callback on the communicator that runs the callback, because such calls would
// deadlock.
TEST(CApiFormat, CallsFromACallbackAreRefusedInsteadOfWaiting) {
  struct Caller {
    std::atomic<gw_comm> comm{nullptr};
    std::atomic<int> refused{0};
    Own own;
  };
  static Caller caller;
  gw_format f = format("reentrant", reinterpret_cast<Own*>(&caller));
  f.encode = [](void* user, const float* values, int64_t blocks, uint8_t* bytes) -> const char* {
    auto& c = *static_cast<Caller*>(user);
    if (gw_comm comm = c.comm) {
      float value = 0;
      gw_reducer reducer = nullptr;
      GW_EXPECT_BAD("encode or decode", capi::sum(comm, value));
      GW_EXPECT_BAD("encode or decode", gw_reducer_create(comm, "fp32", nullptr, 0, nullptr, &reducer));
      GW_EXPECT_BAD("encode or decode", gw_comm_destroy(comm));
      ++c.refused;
    }
    return encode(&c.own, values, blocks, bytes);
  };
  f.decode = [](void* user, const uint8_t* bytes, int64_t blocks, float* values) {
    return decode(&static_cast<Caller*>(user)->own, bytes, blocks, values);
  };
  GW_ASSERT_OK(gw_format_register(&f));
  run_ranks(2, [&](gw_comm comm, int rank) {
    if (rank == 0) caller.comm = comm;
    std::vector<float> values(1000, 1.0f);
    GW_EXPECT_OK(capi::sum(comm, values, "reentrant"));
    EXPECT_EQ(values[999], 2.0f);
  });
  EXPECT_GT(caller.refused, 0);
}

}  // namespace
