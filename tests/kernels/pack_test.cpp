#include "kernels/powersgd/powersgd.h"

#include "tests/kernels/backend.h"

namespace gradwire {
namespace {

class PackTest : public testing::OpTest {};

// Packs pieces of awkward sizes and alignments back to back.
TEST_P(PackTest, UnpackRestoresPackedPieces) {
  for (int64_t misalign : {0, 1, 3}) {
    std::vector<Segment> segments;
    int64_t scattered_count = 0, packed_count = 0;
    for (int64_t size : testing::awkward_sizes()) {
      scattered_count += 5;  // a gap that must be unchanged
      segments.push_back({scattered_count, packed_count, size});
      scattered_count += size;
      packed_count += size;
    }
    std::vector<float> values = normal(scattered_count, 1);
    auto scattered = array<float>(values, misalign);
    auto packed = array<float>(packed_count, misalign);
    SegmentTable table(stream, segments);
    GW_RUN(pack, (Pack{&table, scattered.data(), packed.data(), false}));
    packed.expect_guards_intact("packed");
    std::vector<float> expected(packed_count);
    reference::pack({&table, values.data(), expected.data(), false});
    ASSERT_EQ(packed.host(), expected);

    std::vector<float> zeros(values.size(), 0.0f), restored(values.size(), 0.0f);
    scattered.set(zeros);
    GW_RUN(pack, (Pack{&table, scattered.data(), packed.data(), true}));
    scattered.expect_guards_intact("scattered");
    reference::pack({&table, restored.data(), expected.data(), true});
    EXPECT_EQ(scattered.host(), restored);
    EXPECT_EQ(restored[0], 0.0f);

    restored = normal(scattered_count, 2);
    scattered.set(restored);
    GW_RUN(pack, (Pack{&table, scattered.data(), nullptr, true}));
    scattered.expect_guards_intact("scattered");
    reference::pack({&table, restored.data(), nullptr, true});
    EXPECT_EQ(scattered.host(), restored);
  }
}

TEST_P(PackTest, AcceptsAnEmptyList) {
  SegmentTable table(stream, {});
  GW_RUN(pack, (Pack{&table, nullptr, nullptr, false}));
}

GW_INSTANTIATE_BACKENDS(PackTest);

}  // namespace
}  // namespace gradwire
