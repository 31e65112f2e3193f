// The ops that move heads. The ops only move values, so both storage types have the reference's bits.
#include "kernels/vit/elementwise.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t batch, tokens, heads, dim;
  int64_t size() const { return batch * tokens * heads * dim; }
  std::string name() const { return fmt::format("{}x{}x{}x{}", batch, tokens, heads, dim); }

  template <typename Args>
  Args operator()(Args args) const {
    args.batch = batch, args.tokens = tokens, args.heads = heads, args.head_dim = dim;
    return args;
  }
};
const std::vector<Shape> kShapes = {{0, 17, 4, 16}, {1, 1, 1, 1},    {3, 17, 4, 16},
                                    {2, 5, 3, 7},   {2, 50, 2, 64},  {1, 9, 5, 33},
                                    {7, 3, 2, 4},   {2, 13, 1, 129}, {1, 9, 2, 40}};

class VitHeads : public OpTest {
 public:
  template <typename S>
  void check_split(const Shape& s, int64_t misalign, bool with_bias) {
    Operand<S> qkv(*this, normal(3 * s.size(), 1), misalign), q(*this, s.size(), misalign),
        k(*this, s.size(), misalign), v(*this, s.size(), misalign), d_qkv(*this, 3 * s.size(), misalign);
    Operand<float> bias(*this, normal(3 * s.heads * s.dim, 2), misalign);
    GW_RUN_BOTH(split_heads, [&](auto on) {
      return s(SplitHeads{
          .qkv = on(qkv), .bias = with_bias ? on(bias) : nullptr, .q = on(q), .k = on(k), .v = on(v)});
    });
    for (auto* part : {&q, &k, &v}) {
      part->host = widened(narrowed<S>(part->host));  // rounds after the bias is added
      part->expect_same_bits("q, k or v");
    }
    GW_RUN_BOTH(split_heads_backward, [&](auto on) {
      return s(SplitHeadsBackward{.dq = on(q), .dk = on(k), .dv = on(v), .d_qkv = on(d_qkv)});
    });
    d_qkv.expect_same_bits("d_qkv");
    // Without a bias, the backward op is the inverse of split_heads.
    if (!with_bias) expect_same_bits(d_qkv.host, qkv.host, "split and merged");
  }
  template <typename S>
  void check_merge(const Shape& s, int64_t misalign) {
    Operand<S> in(*this, normal(s.size(), 4), misalign), merged(*this, s.size(), misalign),
        back(*this, s.size(), misalign);
    GW_RUN_BOTH(merge_heads, [&](auto on) { return s(MergeHeads{.in = on(in), .out = on(merged)}); });
    merged.expect_same_bits("merged");
    GW_RUN_BOTH(merge_heads,
                [&](auto on) { return s(MergeHeads{.in = on(merged), .out = on(back), .inverse = true}); });
    back.expect_same_bits("split again");
    expect_same_bits(back.host, in.host, "split again");
  }
};

TEST_P(VitHeads, SplitMatchesTheReferenceAndIsInvertedByItsBackward) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    for (bool with_bias : {false, true}) {
      check_split<float>(s, misalign, with_bias);
      check_split<Bf16>(s, misalign, with_bias);
    }
  });
}

TEST_P(VitHeads, MergeMatchesTheReferenceAndIsInvertedByItsInverse) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    check_merge<float>(s, misalign);
    check_merge<Bf16>(s, misalign);
  });
}

GW_INSTANTIATE_BACKENDS(VitHeads);

}  // namespace
}  // namespace gradwire::testing
