// Tests that damaged states, forged states and states of another reducer are rejected and change nothing.
#include <zlib.h>

#include <algorithm>
#include <random>

#include "tests/capi/ranks.h"

namespace {

using capi::Model;
using capi::normal;
using capi::run_ranks;

// Writes the checksum of a forged state.
void seal(std::vector<char>& state) {
  const auto crc = static_cast<uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(state.data()) + 40, static_cast<uInt>(state.size() - 40)));
  std::memcpy(&state[12], &crc, 4);
}

TEST(CApiErrors, RejectsStatesOfOtherReducers) {
  run_ranks(2, [](gw_comm comm, int rank) {
    const Model model;
    auto step = [&](gw_reducer reducer) {
      auto flat = normal(model.elements(), static_cast<unsigned>(rank));
      auto at = model.addresses(flat.data());
      GW_EXPECT_OK(gw_reducer_allreduce(reducer, at.data(), nullptr, nullptr));
    };
    capi::Reducer r(comm, "powersgd:rank=2", model);
    step(r.handle);
    const auto good = r.save();
    auto load = [&](const std::vector<char>& state) { return r.load(state); };
    std::vector<char> room(good.size() + 100);
    GW_EXPECT_BAD("state is null", capi::save_state(r.handle, nullptr, room.size()));
    GW_EXPECT_BAD("needs", capi::save_state(r.handle, room.data(), good.size() - 1));
    GW_EXPECT_OK(capi::save_state(r.handle, room.data(), room.size()));
    GW_EXPECT_BAD("state is null", gw_reducer_state_load(r.handle, nullptr, 100));
    GW_EXPECT_BAD("truncated", gw_reducer_state_load(r.handle, good.data(), 0));
    GW_EXPECT_BAD("not a state", load(std::vector<char>(1000, 'x')));
    for (size_t size : {good.size() / 2, good.size() - 1}) {
      GW_EXPECT_BAD("bytes", load(std::vector<char>(good.begin(), good.begin() + size)));
    }
    auto damaged = good;
    damaged[damaged.size() - 3] ^= 1;
    GW_EXPECT_BAD("damaged", load(damaged));
    damaged = good;
    damaged[8] = 9;
    GW_EXPECT_BAD("version 9", load(damaged));

    auto expect_refused = [&](const char* part, const char* spec, const Model& other) {
      GW_EXPECT_BAD(part, load(capi::Reducer(comm, spec, other).save()));
    };
    expect_refused("powersgd:rank=3", "powersgd:rank=3", model);
    Model renamed, reshaped, fewer;
    renamed.names[1] = "taller";
    std::swap(reshaped.rows[1], reshaped.cols[1]);
    fewer.names.pop_back();
    expect_refused("'taller'", "powersgd:rank=2", renamed);
    expect_refused("31 x 129", "powersgd:rank=2", reshaped);
    expect_refused("6 tensors", "powersgd:rank=2", fewer);
    // Forges the state of rank 1 by replacing the rank.
    auto others = good;
    auto at =
        std::search(others.begin(), others.end(), std::begin("rank 0 of 2"), std::begin("rank 0 of 2") + 5);
    ASSERT_NE(at, others.end());
    at[5] = at[5] == '0' ? '1' : '0';
    seal(others);
    GW_EXPECT_BAD("give each rank its own", load(others));

    EXPECT_EQ(r.save(), good);
    GW_EXPECT_OK(load(good));
  });
}

// Loads states with randomly changed bytes and a valid checksum. No access may be out of bounds.
TEST(CApiErrors, RandomlyChangedStatesAreSafe) {
  run_ranks(2, [](gw_comm comm, int rank) {
    const Model model;
    capi::Reducer r(comm, "powersgd:rank=2", model);
    const auto good = r.save();
    std::mt19937 random(static_cast<unsigned>(rank));
    int refused = 0;
    for (int k = 0; k < 2000; ++k) {
      auto state = good;
      for (int change = 0; change < 4; ++change) {
        // Half of the states change only in the first 400 bytes, where headers are.
        size_t at = k % 2 == 0 ? random() % 400 : random() % state.size();
        state[at] = static_cast<char>(k % 3 == 0 ? random() : state[at] ^ (1 << random() % 8));
      }
      if (k % 5 == 0) {
        state.resize(random() % state.size());
        uint64_t bytes = state.size();
        if (bytes >= 40) std::memcpy(&state[16], &bytes, 8);
      }
      if (state.size() >= 40) {
        seal(state);
      }
      refused += r.load(state) != GW_OK;
    }
    EXPECT_GT(refused, 500);
    GW_EXPECT_OK(r.load(good));
  });
}

}  // namespace
