#include <fmt/format.h>

#include "kernels/vit/heads.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t batch, tokens, heads, dim;
  int64_t size() const { return batch * tokens * heads * dim; }
  std::string name() const { return fmt::format("{}x{}x{}x{}", batch, tokens, heads, dim); }
};
const std::vector<Shape> kShapes = {{0, 17, 4, 16}, {1, 1, 1, 1},  {3, 17, 4, 16}, {2, 5, 3, 7},
                                    {2, 50, 2, 64}, {1, 9, 5, 33}, {7, 3, 2, 4},   {2, 13, 1, 129}};

class VitHeads : public OpTest {};

TEST_P(VitHeads, SplitMatchesTheReferenceWithAndWithoutBias) {
  for (const Shape& s : kShapes) {
    auto qkv = normal(3 * s.size(), 1), bias = normal(3 * s.heads * s.dim, 2);
    for (bool with_bias : {false, true}) {
      for (int64_t misalign : {0, 1}) {
        SCOPED_TRACE(fmt::format("{}{} misaligned by {}", s.name(), with_bias ? " with bias" : "", misalign));
        std::vector<float> want[3];
        for (auto& w : want) w.resize(static_cast<size_t>(s.size()));
        SplitHeads args{.qkv = qkv.data(),
                        .bias = with_bias ? bias.data() : nullptr,
                        .q = want[0].data(),
                        .k = want[1].data(),
                        .v = want[2].data(),
                        .batch = s.batch,
                        .tokens = s.tokens,
                        .heads = s.heads,
                        .head_dim = s.dim};
        reference::split_heads(args);
        auto d_qkv = array(qkv, misalign), d_bias = array(bias, misalign);
        auto q = array<float>(s.size(), misalign), k = array<float>(s.size(), misalign),
             v = array<float>(s.size(), misalign);
        args.qkv = d_qkv.data();
        args.bias = with_bias ? d_bias.data() : nullptr;
        args.q = q.data();
        args.k = k.data();
        args.v = v.data();
        GW_RUN(split_heads, args);
        Array<float>* outputs[3] = {&q, &k, &v};
        for (int part = 0; part < 3; ++part) {
          outputs[part]->expect_guards_intact("q, k or v");
          expect_same_bits(outputs[part]->host(), want[part], "q, k or v");
        }
      }
    }
  }
}

TEST_P(VitHeads, SplitBackwardInvertsSplit) {
  for (const Shape& s : kShapes) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", s.name(), misalign));
      auto values = normal(3 * s.size(), 3);
      std::vector<float> parts[3];
      for (auto& p : parts) p.resize(static_cast<size_t>(s.size()));
      reference::split_heads({.qkv = values.data(),
                              .q = parts[0].data(),
                              .k = parts[1].data(),
                              .v = parts[2].data(),
                              .batch = s.batch,
                              .tokens = s.tokens,
                              .heads = s.heads,
                              .head_dim = s.dim});
      auto dq = array(parts[0], misalign), dk = array(parts[1], misalign), dv = array(parts[2], misalign),
           d_qkv = array<float>(3 * s.size(), misalign);
      SplitHeadsBackward args{.dq = dq.data(),
                              .dk = dk.data(),
                              .dv = dv.data(),
                              .d_qkv = d_qkv.data(),
                              .batch = s.batch,
                              .tokens = s.tokens,
                              .heads = s.heads,
                              .head_dim = s.dim};
      GW_RUN(split_heads_backward, args);
      d_qkv.expect_guards_intact("d_qkv");
      expect_same_bits(d_qkv.host(), values, "d_qkv");
      std::vector<float> from_reference(values.size());
      reference::split_heads_backward({.dq = parts[0].data(),
                                       .dk = parts[1].data(),
                                       .dv = parts[2].data(),
                                       .d_qkv = from_reference.data(),
                                       .batch = s.batch,
                                       .tokens = s.tokens,
                                       .heads = s.heads,
                                       .head_dim = s.dim});
      expect_same_bits(from_reference, values, "the reference's d_qkv");
    }
  }
}

TEST_P(VitHeads, MergeMatchesTheReferenceAndIsInvertedByItsInverse) {
  for (const Shape& s : kShapes) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", s.name(), misalign));
      auto values = normal(s.size(), 4);
      std::vector<float> want(values.size());
      MergeHeads args{.in = values.data(),
                      .out = want.data(),
                      .batch = s.batch,
                      .tokens = s.tokens,
                      .heads = s.heads,
                      .head_dim = s.dim};
      reference::merge_heads(args);
      auto in = array(values, misalign), merged = array<float>(s.size(), misalign),
           back = array<float>(s.size(), misalign);
      args.in = in.data();
      args.out = merged.data();
      GW_RUN(merge_heads, args);
      merged.expect_guards_intact("merged");
      expect_same_bits(merged.host(), want, "merged");
      args.in = merged.data();
      args.out = back.data();
      args.inverse = true;
      GW_RUN(merge_heads, args);
      back.expect_guards_intact("split again");
      expect_same_bits(back.host(), values, "split again");
    }
  }
}

GW_INSTANTIATE_BACKENDS(VitHeads);

}  // namespace
}  // namespace gradwire::testing
