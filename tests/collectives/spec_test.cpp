#include "collectives/spec/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "runtime/util/error.h"
#include "tests/collectives/example_specs.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

TEST(Spec, TextSurvivesARoundTrip) {
  for (const char* text : {"fp32",
                           "bf16",
                           "bf16:round=stochastic",
                           "fp8",
                           "fp8:round=stochastic",
                           "powersgd:rank=4,wire=fp8",
                           "powersgd:rank=1,wire=bf16,start=1000,warm=off,min_ratio=1.5,seed=7",
                           "powersgd:rank=4",
                           "fp32:schedule=ring",
                           "fp32:schedule=nccl",
                           "powersgd:rank=2,schedule=nccl",
                           "bf16:schedule=hierarchical",
                           "bf16:ef=off,schedule=two_shot",
                           "powersgd:rank=512,ef=off",
                           "dion:rank=64",
                           "dion:rank=4,mu=0.9,wire=int8,seed=3,residual=bf16",
                           "dion:rank=4,orth=on",
                           "powersgd:rank=2,wire=bf16,round=stochastic",
                           "bf16:intra_node=fp32",
                           "powersgd:rank=2,wire=fp8,schedule=hierarchical,intra_node=fp32",
                           "int8:residual=int8",
                           "powersgd:rank=2,residual=bf16,dense=auto",
                           "fp8:residual=bf16,dense=*.bias+auto+head.?",
                           "powersgd:rank=4,alternate=on",
                           "randk:ratio=0.01",
                           "randk:ratio=1",
                           "randk:ratio=0.001,wire=bf16,seed=7,round=stochastic",
                           "randk:ratio=0.1,ef=off,schedule=ring",
                           "int8:start=5,ef=ef21",
                           "bf16:ef_decay=0.95",
                           "topk:start=5,k=41,ef_decay=0.9,ramp=100,momentum=0.9",
                           "randk:ratio=0.01,ramp=10,momentum=0.5,max_norm=0.25",
                           "powersgd:rank=2,max_norm=1.5",
                           "powersgd:rank=2,ef=ef21"}) {
    CompressionSpec spec = CompressionSpec::parse(text);
    EXPECT_EQ(spec.to_string(), text);
    EXPECT_EQ(CompressionSpec::parse(spec.to_string()), spec);
  }
  for (const std::string& text : example_specs()) {
    const CompressionSpec spec = CompressionSpec::parse(text);
    EXPECT_EQ(CompressionSpec::parse(spec.to_string()), spec) << text;
  }
  EXPECT_EQ(CompressionSpec::parse("bf16:round=nearest,ef=on").to_string(), "bf16");
  EXPECT_EQ(CompressionSpec::parse("powersgd").rank, 1);
  EXPECT_EQ(CompressionSpec::parse("int8:residual=fp32,dense=off,ef=off").to_string(), "int8:ef=off");
  EXPECT_EQ(CompressionSpec::parse("int8:dense=b+auto+b").to_string(), "int8:dense=auto+b");
  EXPECT_EQ(CompressionSpec::parse("randk").to_string(), "randk:ratio=0.01");
}

TEST(Spec, AcceptsACommaInsteadOfTheColonAfterTheName) {
  for (const char* options : {"schedule=ring", "ef=off,round=stochastic"}) {
    EXPECT_EQ(CompressionSpec::parse(fmt::format("bf16,{}", options)).to_string(),
              CompressionSpec::parse(fmt::format("bf16:{}", options)).to_string());
  }
}

// Expects defaults that follow from the format's size to be omitted from the text. Users can turn these
// defaults off.
TEST(Spec, SmallTensorsAreDenseByDefaultBelowEightBits) {
  for (Wire wire : wire_formats()) {
    const bool coarse = wire->bytes_per_value() < 1;
    const CompressionSpec spec = CompressionSpec::parse(wire->name);
    EXPECT_EQ(spec.dense, coarse ? std::vector<std::string>{kDenseAuto} : std::vector<std::string>{});
    EXPECT_EQ(spec.to_string(), wire->name);
    if (wire->exact) continue;
    const CompressionSpec off = CompressionSpec::parse(fmt::format("{}:dense=off", wire->name));
    EXPECT_TRUE(off.dense.empty());
    EXPECT_EQ(off.to_string(), coarse ? fmt::format("{}:dense=off", wire->name) : wire->name);
  }
}

TEST(Spec, DenseNamesAfterAPlusAreAddedToTheDefault) {
  EXPECT_EQ(CompressionSpec::parse("int8:dense=+b+a").to_string(), "int8:dense=a+b");
  EXPECT_EQ(CompressionSpec::parse("int4:dense=+b").to_string(), "int4:dense=auto+b");
  EXPECT_EQ(CompressionSpec::parse("powersgd:rank=2,dense=+b,wire=int4").to_string(),
            CompressionSpec::parse("powersgd:rank=2,wire=int4,dense=auto+b").to_string());
  EXPECT_THROW(CompressionSpec::parse("int8:dense=+"), BadInput);
  EXPECT_THROW(CompressionSpec::parse("int8:dense=++a"), BadInput);
}

TEST(Spec, LoadsStatesThatDifferInTheResidualFormatOnly) {
  const CompressionSpec spec = CompressionSpec::parse("int8:residual=bf16,dense=auto");
  for (const char* same :
       {"int8:dense=auto", "int8:residual=bf16,dense=auto", "int8:residual=int8,dense=auto"}) {
    EXPECT_TRUE(spec.loads_state_of(same)) << same;
  }
  for (const char* other : {"int8", "fp8:dense=auto", "int8:residual=bf16", "no spec at all"}) {
    EXPECT_FALSE(spec.loads_state_of(other)) << other;
  }
}

// A decayed residual stays bounded where a step keeps less than its square.
TEST(Spec, AcceptsErrorFeedbackWhereDecayMakesAStepContract) {
  EXPECT_THROW(CompressionSpec::parse("terngrad:clip=2.5"), BadInput);
  EXPECT_THROW(CompressionSpec::parse("terngrad:clip=2.5,ef_decay=0.9"), BadInput);
  EXPECT_NO_THROW(CompressionSpec::parse("terngrad:clip=2.5,ef_decay=0.8"));
}

// Covers every format in the table with every value of its options.
TEST(Spec, AcceptsErrorFeedbackExactlyWhereAnEncodeContracts) {
  std::vector<std::string> refused;
  for (Wire entry : wire_formats()) {
    if (entry->exact || entry->registered) continue;
    std::vector<std::string> specs = {entry->name};
    const auto variant = entry->copy();
    for (const FormatOption& option : variant == nullptr ? std::vector<FormatOption>() : variant->choices()) {
      if (option.key == std::string("k")) continue;
      std::vector<std::string> more;
      const int steps = option.words.empty() ? option.most : static_cast<int>(option.words.size()) - 1;
      for (int value = option.least; value <= steps; value = option.power_of_two ? value * 2 : value + 1) {
        *option.value = value;
        for (const std::string& spec : specs) {
          more.push_back(
              fmt::format("{}{}{}={}", spec, spec == entry->name ? ":" : ",", option.key, option.text()));
        }
      }
      specs = more;
    }
    for (const std::string& text : specs) {
      for (const char* rounding : {"nearest", "stochastic"}) {
        if (!entry->stochastic && rounding == std::string("stochastic")) continue;
        std::string spec = text;
        if (entry->stochastic) spec += fmt::format("{}round={}", text == entry->name ? ":" : ",", rounding);
        const std::string off = spec + (spec == entry->name ? ":ef=off" : ",ef=off");
        const bool contracts = CompressionSpec::parse(off).divergence().empty();
        if (contracts) {
          EXPECT_NO_THROW(CompressionSpec::parse(spec)) << spec;
        } else {
          EXPECT_THROW(CompressionSpec::parse(spec), BadInput) << spec;
          refused.push_back(spec);
        }
      }
    }
  }
  // Refused specs: qsgd in 4 bits with blocks of 256 and 512, rotated or not, with either rounding; and
  // terngrad with the larger clips, in every block size, rotated or not, with stochastic rounding.
  EXPECT_EQ(refused.size(), 2 * 2 * 2 + 5 * 2 * 2) << fmt::format("{}", fmt::join(refused, "\n"));
  for (const std::string& spec : refused) {
    EXPECT_TRUE(spec.find("bits=4") != std::string::npos || spec.find("clip=2.5") != std::string::npos ||
                spec.find("clip=off") != std::string::npos)
        << spec;
  }
}

TEST(Spec, ErrorsNameTheInvalidPart) {
  struct Case {
    const char* text;
    const char* culprit;
  };
  for (const Case& c :
       {Case{"", "unknown method"}, Case{"fp23", "'fp23'"}, Case{"bf16:", "nothing after"},
        Case{"bf16,", "nothing after"}, Case{"bf16:ef", "'ef'"}, Case{"bf16:rank=4", "no option 'rank'"},
        Case{"powersgd:rank=0", "rank='0'"}, Case{"powersgd:rank=513", "rank='513'"},
        Case{"dion:rank=4,ef=off", "momentum"}, Case{"dion:rank=4,mu=2", "mu='2'"},
        Case{"powersgd:rank=4x", "rank='4x'"}, Case{"powersgd:rank=-1", "rank='-1'"},
        Case{"powersgd:rank=4,rank=2", "given twice"}, Case{"powersgd:rank=4,", "ends in"},
        Case{"powersgd:wire=fp16", "fp32|bf16"}, Case{"fp32:schedule=star", "ring|tree"},
        Case{"powersgd:round=stochastic", "wire=bf16"}, Case{"bf16:intra_node=fp16", "wire|fp32"},
        Case{"bf16:schedule=ring,intra_node=fp32", "schedule=ring ignores nodes"},
        Case{"bf16:schedule=nccl", "schedule=nccl adds FP32, not bf16"},
        Case{"powersgd:rank=2,wire=fp8,schedule=nccl", "use wire format fp32"},
        Case{"fp32:transport=peer", "no option 'transport'"}, Case{"int8:residual=fp16", "fp32|bf16|int8"},
        Case{"fp32:residual=int8", "no option 'residual'"},
        Case{"int8:ef=off,residual=bf16", "residual=bf16 needs error feedback"}, Case{"int8:dense=", "''"},
        Case{"int8:dense=a++b", "dense='a++b'"}, Case{"int8:dense=off+b", "'off'"},
        Case{"fp32:dense=auto", "'dense'"}, Case{"powersgd:min_ratio=nan", "min_ratio='nan'"},
        Case{"powersgd:alternate=yes", "on|off"},
        Case{"powersgd:alternate=on,warm=off", "alternate=on needs warm=on"},
        Case{"randk:ratio=0", "ratio='0'"},
        Case{"randk:ratio=2", "ratio='2' is not a number from 1e-06 to 1"},
        Case{"randk:ratio=nan", "ratio='nan'"}, Case{"randk:rank=2", "no option 'rank'"},
        Case{"bf16:ratio=0.1", "no option 'ratio'"}, Case{"randk:round=stochastic", "wire=bf16"},
        // With this spec, error feedback would diverge.
        Case{"qsgd:bits=4", "it needs block=128, or ef=off"},
        Case{"qsgd:bits=4,block=256,round=nearest", "it needs block=128, or ef=off"},
        Case{"powersgd:rank=2,wire=qsgd,bits=4", "it needs block=128, or ef=off"},
        Case{"randk:wire=terngrad,clip=off", "it needs clip=2, or ef=off"},
        Case{"terngrad:clip=2.5", "may lose 1.48 times"},
        // The residual's policies.
        Case{"int8:ef=ef2", "ef='ef2' is not one of on|off|ef21"}, Case{"int8:ef_decay=0", "ef_decay='0'"},
        Case{"int8:ef_decay=1.5", "ef_decay='1.5'"}, Case{"fp32:ef_decay=0.9", "no option 'ef_decay'"},
        Case{"int8:ef=off,ef_decay=0.9", "ef_decay=0.9 needs ef=on, not ef=off"},
        Case{"int8:ef=ef21,ef_decay=0.9", "ef_decay=0.9 needs ef=on, not ef=ef21"},
        Case{"int8:ef=ef21,residual=bf16", "ef=ef21 needs residual=fp32"},
        Case{"fp32:ef=ef21", "ef=ef21 needs a format with encoding errors"},
        Case{"int8:start=-1", "start='-1'"}, Case{"fp32:start=2", "no option 'start'"},
        Case{"bf16:ramp=5", "ramp=5 has no step between FP32 and bf16"},
        Case{"randk:ratio=0.5,ramp=5", "ramp=5 has no step between FP32 and ratio=0.5"},
        Case{"powersgd:ramp=5", "no option 'ramp'"}, Case{"int8:momentum=0.9", "no option 'momentum'"},
        Case{"topk:momentum=1", "momentum='1'"}, Case{"int8:max_norm=0", "max_norm='0'"},
        Case{"dion:rank=4,max_norm=1", "no option 'max_norm'"},
        Case{"fp32:max_norm=1", "no option 'max_norm'"},
        Case{"topk:momentum=0.9,ef=off", "momentum=0.9 needs ef=on, not ef=off"}}) {
    SCOPED_TRACE(c.text);
    testing::expect_error<BadInput>([&] { CompressionSpec::parse(c.text); }, {c.culprit});
  }
}

}  // namespace
}  // namespace gradwire
