// Tests that the C ABI's states hold all state of a codec, of any kind and type, and resume training bit for
// bit.
#include "tests/support/own_codec.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "tests/capi/ranks.h"

namespace capi {
namespace {

using gradwire::c_api::ApiReducer;

// Returns a reducer's handle, as gw_reducer_create() does, but with a codec that no spec names.
gw_reducer make_reducer(gw_comm comm, const Model& model, int64_t bucket_bytes, bool own_codec = true) {
  auto locked = gradwire::c_api::comms().get(comm);
  std::string tag;
  auto options = gradwire::c_api::read_options(nullptr, &tag);
  options.bucket_bytes = bucket_bytes;
  options.stream = locked->stream;
  if (own_codec) options.make_codec = gradwire::testing::make_own_codec;
  std::vector<void*> nowhere;
  const auto tensors = model.tensors();
  auto read = gradwire::c_api::read_tensors(tensors.data(), static_cast<int32_t>(tensors.size()), &nowhere);
  return static_cast<gw_reducer>(gradwire::c_api::reducers().add(std::make_shared<ApiReducer>(
      locked, gradwire::CompressionSpec::parse("bf16"), std::move(read), options)));
}

TEST(CApiInside, StateOfACustomCodecIsKept) {
  const Model model;
  run_ranks(2, [&](gw_comm comm, int rank) {
    auto step = [&](const Reducer& reducer, int s) {
      auto gradient = normal(model.elements(), static_cast<unsigned>(s * 2 + rank));
      auto at = model.addresses(gradient.data());
      GW_EXPECT_OK(gw_reducer_allreduce(reducer.handle, at.data(), nullptr, nullptr));
      return gradient;
    };
    constexpr int64_t kSmall = 8 << 10;
    Reducer straight(make_reducer(comm, model, kSmall)), resumed(make_reducer(comm, model, kSmall)),
        one_bucket(make_reducer(comm, model, 1 << 30));
    ASSERT_GT(stats_of(straight.handle).buckets, 2);
    ASSERT_EQ(stats_of(one_bucket.handle).buckets, 1);
    const auto fresh = straight.save();
    for (int s = 0; s < 3; ++s) step(straight, s);
    const auto state = straight.save();
    EXPECT_NE(state, fresh);
    for (const Reducer* other : {&resumed, &one_bucket}) {
      step(*other, 77);  // loading must undo this step
      GW_ASSERT_OK(gw_reducer_state_load(other->handle, state.data(), state.size()));
      EXPECT_EQ(other->save(), state);
    }
    for (int s = 3; s < 6; ++s) EXPECT_EQ(step(straight, s), step(resumed, s)) << "step " << s;
    EXPECT_EQ(straight.save(), resumed.save());

    // A reducer with the same spec but another codec rejects the state by name and remains unchanged.
    Reducer plain(make_reducer(comm, model, kSmall, false));
    step(plain, 5);
    const auto plain_state = plain.save();
    GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "has a 'velocity' in the state only",
                    gw_reducer_state_load(plain.handle, state.data(), state.size()));
    GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "the state has no 'velocity' of 'bias'",
                    gw_reducer_state_load(straight.handle, plain_state.data(), plain_state.size()));
    EXPECT_EQ(plain.save(), plain_state);
    EXPECT_EQ(straight.save(), resumed.save());
  });
}

}  // namespace
}  // namespace capi
