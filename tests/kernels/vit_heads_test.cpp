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
  void check_parts(const Shape& s, int64_t misalign, int parts, bool with_bias) {
    Operand<S> rows(*this, normal(parts * s.size(), 1), misalign), q(*this, s.size(), misalign),
        k(*this, s.size(), misalign), v(*this, s.size(), misalign), merged(*this, parts * s.size(), misalign);
    Operand<float> bias(*this, normal(parts * s.heads * s.dim, 2), misalign);
    auto args = [&](auto on, auto& of) {
      auto heads = s(Heads{.rows = on(of), .parts = {on(q)}});
      if (parts == 3) heads.parts = {on(q), on(k), on(v)};
      return heads;
    };
    GW_RUN_BOTH(split_heads, [&](auto on) {
      auto split = args(on, rows);
      if (with_bias) split.bias = on(bias);
      return split;
    });
    for (auto* part : {&q, &k, &v}) {
      if (part != &q && parts == 1) continue;
      part->host = widened(narrowed<S>(part->host));  // rounds after the bias is added
      part->expect_same_bits("q, k or v");
    }
    GW_RUN_BOTH(merge_heads, [&](auto on) { return args(on, merged); });
    merged.expect_same_bits("merged");
    if (!with_bias) expect_same_bits(merged.host, rows.host, "split and merged");
  }
};

TEST_P(VitHeads, SplitMatchesTheReferenceAndIsInvertedByMerge) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    for (int parts : {1, 3}) {
      for (bool with_bias : {false, true}) {
        check_parts<float>(s, misalign, parts, with_bias);
        check_parts<Bf16>(s, misalign, parts, with_bias);
      }
    }
  });
}

GW_INSTANTIATE_BACKENDS(VitHeads);

}  // namespace
}  // namespace gradwire::testing
