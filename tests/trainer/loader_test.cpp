// Tests the loader: every image occurs once per epoch over all ranks, all ranks use one order, and the
// batches do not depend on timing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "runtime/util/error.h"
#include "tests/trainer/files.h"
#include "trainer/data/loader.h"

namespace gradwire {
namespace {

// Returns a data set of `count` images with one row of pixels. An image's label is its index, so that a batch
// identifies its images.
Dataset numbered(int64_t count, int32_t channels = 2) {
  Dataset data;
  data.name = "numbered";
  data.channels = channels;
  data.height = 1;
  data.width = 5;
  data.classes = 1 << 20;
  for (int64_t i = 0; i < count; ++i) {
    data.labels.push_back(static_cast<int32_t>(i));
    for (int64_t e = 0; e < data.image_elements(); ++e)
      data.images.push_back(static_cast<uint8_t>(i * 31 + e * 7));
  }
  for (int32_t c = 0; c < channels; ++c) {
    data.mean.push_back(0.25f * static_cast<float>(c + 1));
    data.stddev.push_back(0.5f + static_cast<float>(c));
  }
  return data;
}

struct Fetched {
  std::vector<float> images;
  std::vector<int32_t> labels;
};

Fetched fetch(Loader& loader, const Dataset& data, const Stream& stream, int64_t batch_size) {
  Fetched out;
  out.images.assign(static_cast<size_t>(batch_size * data.image_elements()), NAN);
  out.labels.assign(static_cast<size_t>(batch_size), -1);
  const Loader::Batch batch = loader.next(stream);
  copy(stream, out.images.data(), batch.images,
       static_cast<size_t>(batch.count * data.image_elements()) * sizeof(float));
  copy(stream, out.labels.data(), batch.labels, static_cast<size_t>(batch.count) * sizeof(int32_t));
  loader.release(stream);
  stream.synchronize();
  out.images.resize(static_cast<size_t>(batch.count * data.image_elements()));
  out.labels.resize(static_cast<size_t>(batch.count));
  return out;
}

struct Case {
  int64_t count, batch_size, group;
  int world;
};

std::vector<Case> cases() {
  return {{1, 1, 1, 1},    {7, 2, 1, 3},  {64, 8, 1, 4}, {100, 7, 1, 3},  {100, 33, 1, 3},
          {1000, 1, 1, 8}, {97, 5, 3, 2}, {60, 5, 2, 2}, {128, 16, 1, 8}, {1001, 10, 10, 4}};
}

TEST(Loader, TrainingTakesEachImageAtMostOnceAndDropsOnlyTheIncompleteStep) {
  for (const Case& c : cases()) {
    Dataset data = numbered(c.count);
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      std::map<int64_t, int> seen;
      int64_t batches = -1;
      for (int rank = 0; rank < c.world; ++rank) {
        Loader loader(
            data, {.rank = rank, .world = c.world, .batch_size = c.batch_size, .group = c.group, .seed = 5});
        if (batches < 0) batches = loader.batches_per_epoch();
        EXPECT_EQ(loader.batches_per_epoch(), batches);
        for (int64_t b = 0; b < batches; ++b) {
          std::vector<int64_t> indices = loader.indices(epoch, b);
          EXPECT_EQ(static_cast<int64_t>(indices.size()), c.batch_size);
          for (int64_t i : indices) ++seen[i];
        }
      }
      int64_t step = c.batch_size * c.world * c.group;
      EXPECT_EQ(batches % c.group, 0);
      EXPECT_EQ(static_cast<int64_t>(seen.size()), c.count / step * step);
      for (const auto& [image, times] : seen) {
        EXPECT_EQ(times, 1) << "image " << image;
        EXPECT_TRUE(image >= 0 && image < c.count);
      }
    }
  }
}

TEST(Loader, EvaluationTakesEachImageExactlyOnce) {
  for (const Case& c : cases()) {
    Dataset data = numbered(c.count);
    std::map<int32_t, int> seen;
    for (int rank = 0; rank < c.world; ++rank) {
      Loader loader(
          data,
          {.rank = rank, .world = c.world, .batch_size = c.batch_size, .shuffle = false, .drop_last = false});
      Stream stream = Stream::create(Device::host(), "test");
      for (int64_t b = 0; b < loader.batches_per_epoch(); ++b) {
        for (int32_t label : fetch(loader, data, stream, c.batch_size).labels) ++seen[label];
      }
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), c.count);
    for (const auto& [image, times] : seen) EXPECT_EQ(times, 1) << "image " << image;
  }
}

TEST(Loader, NextMatchesIndicesAcrossEpochs) {
  Dataset data = numbered(50);
  Stream stream = Stream::create(Device::host(), "test");
  for (int rank = 0; rank < 3; ++rank) {
    Loader loader(data, {.rank = rank, .world = 3, .batch_size = 4, .seed = 9});
    for (int64_t i = 0; i < 3 * loader.batches_per_epoch(); ++i) {
      std::vector<int64_t> expected =
          loader.indices(i / loader.batches_per_epoch(), i % loader.batches_per_epoch());
      std::vector<int32_t> labels = fetch(loader, data, stream, 4).labels;
      EXPECT_EQ(std::vector<int64_t>(labels.begin(), labels.end()), expected);
    }
  }
}

TEST(Loader, StartsAtAnyBatch) {
  const Dataset data = numbered(30);
  const Stream stream = Stream::immediate_host();
  LoaderOptions options{.rank = 1, .world = 2, .batch_size = 4, .seed = 5};
  Loader whole(data, options);
  for (int64_t first = 0; first < 3 * whole.batches_per_epoch(); ++first) {
    options.first_batch = first;
    Loader rest(data, options);
    EXPECT_EQ(batches_per_epoch(data, options), whole.batches_per_epoch());
    for (int i = 0; i < 2; ++i) {
      const int64_t batch = first + i;
      EXPECT_EQ(fetch(rest, data, stream, 4).labels.front(),
                whole.indices(batch / whole.batches_per_epoch(), batch % whole.batches_per_epoch()).front());
    }
  }
}

// Checks a property that --elastic without keep-local relies on.
TEST(Loader, GlobalBatchesDoNotDependOnTheNumberOfRanks) {
  const Dataset data = numbered(100);
  Loader whole(data, {.batch_size = 16, .seed = 3});
  for (const int world : {2, 3, 5, 7}) {
    for (int64_t batch = 0; batch < whole.batches_per_epoch(); ++batch) {
      std::vector<int64_t> together;
      for (int rank = 0; rank < world; ++rank) {
        Loader part(data, {.rank = rank,
                           .world = world,
                           .batch_size = (16 + world - 1) / world,
                           .global_batch = 16,
                           .seed = 3,
                           .first_batch = batch});
        EXPECT_EQ(part.batches_per_epoch(), whole.batches_per_epoch());
        const std::vector<int64_t> indices = part.indices(0, batch);
        EXPECT_EQ(static_cast<int64_t>(indices.size()), part_of_batch(16, rank, world));
        EXPECT_EQ(part.next(Stream::immediate_host()).count, part_of_batch(16, rank, world));
        together.insert(together.end(), indices.begin(), indices.end());
      }
      EXPECT_EQ(together, whole.indices(0, batch)) << world << " ranks";
    }
  }
  testing::expect_error<BadInput>([&] { Loader(data, {.world = 2, .batch_size = 7, .global_batch = 16}); },
                                  {"16"});
}

TEST(Loader, PixelsAreNormalizedPerChannel) {
  Dataset data = numbered(9, 3);
  Stream stream = Stream::create(Device::host(), "test");
  Loader loader(data, {.batch_size = 9, .seed = 2});
  Fetched batch = fetch(loader, data, stream, 9);
  for (size_t i = 0; i < 9; ++i) {
    for (size_t e = 0; e < 15; ++e) {
      size_t c = e / 5;
      float raw = data.images[static_cast<size_t>(batch.labels[i]) * 15 + e];
      EXPECT_NEAR(batch.images[i * 15 + e], (raw / 255 - data.mean[c]) / data.stddev[c], 1e-5);
    }
  }
}

TEST(Loader, SameSeedGivesTheSameBitsAndOneOrderForAllRanks) {
  Dataset data = numbered(200);
  Stream stream = Stream::create(Device::host(), "test");
  LoaderOptions options{.rank = 1, .world = 4, .batch_size = 6, .seed = 11};
  Loader a(data, options), b(data, options);
  for (int i = 0; i < 20; ++i) {
    Fetched one = fetch(a, data, stream, 6), two = fetch(b, data, stream, 6);
    EXPECT_EQ(one.labels, two.labels);
    EXPECT_EQ(one.images, two.images);
  }
  // The ranks' batches of one epoch together are the epoch's permutation.
  std::vector<int64_t> order = epoch_permutation(200, 11, 4), together;
  std::vector<std::unique_ptr<Loader>> loaders;
  for (int rank = 0; rank < 4; ++rank) {
    options.rank = rank;
    loaders.push_back(std::make_unique<Loader>(data, options));
  }
  for (int64_t batch = 0; batch < loaders[0]->batches_per_epoch(); ++batch) {
    for (auto& loader : loaders) {
      std::vector<int64_t> part = loader->indices(4, batch);
      together.insert(together.end(), part.begin(), part.end());
    }
  }
  order.resize(together.size());
  EXPECT_EQ(together, order);
}

TEST(Loader, SeedAndEpochChangeTheOrder) {
  std::vector<int64_t> first = epoch_permutation(1000, 1, 0);
  EXPECT_EQ(first, epoch_permutation(1000, 1, 0));
  EXPECT_NE(first, epoch_permutation(1000, 1, 1));
  EXPECT_NE(first, epoch_permutation(1000, 2, 0));
  std::vector<int64_t> sorted = first;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> identity(1000);
  std::iota(identity.begin(), identity.end(), 0);
  EXPECT_EQ(sorted, identity);
  EXPECT_NE(first, identity);
  EXPECT_TRUE(epoch_permutation(0, 1, 0).empty());
  EXPECT_EQ(epoch_permutation(1, 1, 0), std::vector<int64_t>{0});
}

// Checks that over many epochs each image occurs equally often at every position. An order that keeps images
// near their position trains badly.
TEST(Loader, ShufflingReachesEveryPlace) {
  constexpr int64_t kCount = 10, kEpochs = 4000;
  std::vector<int> landed(kCount * kCount);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    std::vector<int64_t> order = epoch_permutation(kCount, 3, epoch);
    for (int64_t place = 0; place < kCount; ++place) ++landed[place * kCount + order[place]];
  }
  for (int times : landed) EXPECT_NEAR(times, kEpochs / kCount, 100);  // 5 standard deviations
}

// Checks that a slow consumer, which reads long after next() has returned, does not read a refilled slot.
TEST(Loader, SlotIsNotRefilledBeforeItsReaderIsDone) {
  Dataset data = numbered(64);
  for (int64_t slots : {1, 2, 3}) {
    Stream stream = Stream::create(Device::host(), "slow");
    Loader loader(data, {.batch_size = 4, .seed = 1, .slots = slots});
    constexpr int kBatches = 16;
    std::vector<std::vector<int32_t>> labels(kBatches, std::vector<int32_t>(4, -1));
    for (size_t b = 0; b < kBatches; ++b) {
      const Loader::Batch batch = loader.next(stream);
      ASSERT_EQ(batch.count, 4);
      stream.submit([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
      copy(stream, labels[b].data(), batch.labels, 4 * sizeof(int32_t));
      loader.release(stream);
    }
    stream.synchronize();
    for (size_t b = 0; b < kBatches; ++b) {
      EXPECT_EQ(std::vector<int64_t>(labels[b].begin(), labels[b].end()),
                loader.indices(0, static_cast<int64_t>(b)));
    }
  }
}

// Checks that every second step uses the same addresses, because a captured step reads from the addresses of
// its capture.
TEST(Loader, EverySecondStepUsesTheSameAddresses) {
  Dataset data = numbered(64);
  const Stream stream = Stream::immediate_host();
  for (int64_t per_step : {1, 2, 3}) {
    for (int64_t first : {0, 5}) {
      Loader loader(data, {.batch_size = 4, .group = per_step, .first_batch = first, .slots = 2 * per_step});
      std::map<int64_t, const float*> images;
      std::map<int64_t, const int32_t*> labels;
      for (int64_t step = 0; step < 7; ++step) {
        for (int64_t i = 0; i < per_step; ++i) {  // take all batches of a step before releasing them
          const Loader::Batch batch = loader.next(stream);
          const int64_t slot = step % 2 * per_step + i;
          EXPECT_EQ(batch.slot, slot);
          EXPECT_EQ(images.try_emplace(slot, batch.images).first->second, batch.images);
          EXPECT_EQ(labels.try_emplace(slot, batch.labels).first->second, batch.labels);
        }
        for (int64_t i = 0; i < per_step; ++i) loader.release(stream);
      }
    }
  }
}

TEST(Loader, TakingWithoutReleasingThrowsInsteadOfADeadlock) {
  Dataset data = numbered(64);
  const Stream stream = Stream::immediate_host();
  Loader loader(data, {.batch_size = 4});
  EXPECT_THROW(loader.release(stream), Error);
  loader.next(stream);
  loader.next(stream);
  EXPECT_THROW(loader.next(stream), Error);
  loader.release(stream);
  EXPECT_EQ(loader.next(stream).slot, 0);
}

TEST(Loader, StopsWhenDestroyedAtAnyTime) {
  Dataset data = numbered(64);
  for (int taken = 0; taken < 6; ++taken) {
    Stream stream = Stream::create(Device::host(), "test");
    Loader loader(data, {.batch_size = 4});
    for (int i = 0; i < taken; ++i) fetch(loader, data, stream, 4);
  }
}

TEST(Loader, RethrowsErrorsOfAFailedStream) {
  Dataset data = numbered(64);
  Stream stream = Stream::create(Device::host(), "failing");
  Loader loader(data, {.batch_size = 4});
  stream.submit([] { throw Error("broken on purpose"); });
  try {
    for (int i = 0; i < 10; ++i) {
      loader.next(stream);
      loader.release(stream);
    }
    ADD_FAILURE() << "no error arrived";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "broken on purpose");
  }
}

TEST(Loader, RejectsInvalidOptions) {
  Dataset data = numbered(10);
  testing::expect_bad_input([&] { Loader(data, {.world = 4, .batch_size = 3}); },
                            {"10 images", "12", "--batch-size"});
  testing::expect_bad_input([&] { Loader(data, {.world = 2, .batch_size = 2, .group = 3}); },
                            {"10 images", "12"});
  testing::expect_bad_input([&] { Loader(data, {.rank = 2, .world = 2}); }, {"rank 2 of 2"});
  testing::expect_bad_input([&] { Loader(data, {.batch_size = 0}); }, {"batches of 0"});
  Loader loader(data, {.world = 4, .batch_size = 3, .shuffle = false, .drop_last = false});
  EXPECT_EQ(loader.batches_per_epoch(), 1);
}

}  // namespace
}  // namespace gradwire
