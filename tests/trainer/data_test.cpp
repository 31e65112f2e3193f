// Tests the readers of data sets: they return the contents and report every kind of damage.
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>

#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "trainer/data/dataset.h"
#include "trainer/data/safetensors.h"

namespace gradwire {
namespace {

using namespace testing;

TEST(FashionMnist, ReadsPixelsLabelsAndShape) {
  TemporaryFolder folder;
  write_fashion_mnist(folder, 50, 20);
  DataSplits data = load_fashion_mnist(folder.path());
  EXPECT_EQ(data.train.count(), 50);
  EXPECT_EQ(data.test.count(), 20);
  for (const Dataset* split : {&data.train, &data.test}) {
    EXPECT_EQ(split->channels, 1);
    EXPECT_EQ(split->height, 28);
    EXPECT_EQ(split->width, 28);
    EXPECT_EQ(split->classes, 10);
    for (size_t i = 0; i < split->labels.size(); ++i)
      EXPECT_EQ(split->labels[i], static_cast<int32_t>(i % 10));
    for (size_t i = 0; i < split->images.size(); ++i)
      ASSERT_EQ(split->images[i], pixel(i / 784, i % 784)) << i;
  }
}

TEST(FashionMnist, ReadsUncompressedFiles) {
  TemporaryFolder folder;
  write_fashion_mnist(folder);
  std::filesystem::remove(folder.path("train-images-idx3-ubyte.gz"));
  write_bytes(folder.path("train-images-idx3-ubyte"), idx_images(50, 28, 28));
  EXPECT_EQ(load_fashion_mnist(folder.path()).train.count(), 50);
}

// Finds the folders that torchvision creates, and archives of MNIST whose names contain a dot.
TEST(FashionMnist, FindsFoldersAndNamesOfOtherDistributions) {
  for (const char* below : {"", "fashion-mnist", "raw", "FashionMNIST/raw", "MNIST/raw"}) {
    for (const bool dotted : {false, true}) {
      for (const bool gzip : {false, true}) {
        TemporaryFolder folder;
        const std::string inner = folder.path(std::string("data/") + below);
        std::filesystem::create_directories(inner);
        for (const auto& [prefix, count] : {std::pair{"train", 50u}, std::pair{"t10k", 20u}}) {
          for (const bool images : {true, false}) {
            const std::string name = fmt::format("{}/{}-{}{}{}", inner, prefix, images ? "images" : "labels",
                                                 dotted ? "." : "-", images ? "idx3-ubyte" : "idx1-ubyte");
            const Bytes bytes = images ? idx_images(count, 28, 28) : idx_labels(count);
            gzip ? write_gzip(name + ".gz", bytes) : write_bytes(name, bytes);
          }
        }
        EXPECT_EQ(load_fashion_mnist(folder.path("data")).train.count(), 50) << below << dotted << gzip;
        ASSERT_EQ(setenv("GRADWIRE_DATA", folder.path("data").c_str(), 1), 0);
        EXPECT_EQ(load_data(DataSpec::parse("fashion-mnist"), VitConfig{}, 0).train.count(), 50);
        ASSERT_EQ(unsetenv("GRADWIRE_DATA"), 0);
      }
    }
  }
}

TEST(FashionMnist, ReadsAGoodFileNextToADamagedOneWithANote) {
  TemporaryFolder folder;
  write_fashion_mnist(folder);
  const std::string path = folder.path("train-images-idx3-ubyte");
  const Bytes whole = read_bytes(path + ".gz");
  write_bytes(path, idx_images(50, 28, 28));
  EXPECT_TRUE(load_fashion_mnist(folder.path()).notes.empty());
  write_bytes(path + ".gz", Bytes(whole.begin(), whole.begin() + 100));
  const DataSplits splits = load_fashion_mnist(folder.path());
  EXPECT_EQ(splits.train.count(), 50);
  ASSERT_EQ(splits.notes.size(), 1u);
  expect_has(splits.notes[0], {"truncated gzip"});
  write_bytes(path, Bytes(10, 'x'));
  expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path + ".gz", "truncated gzip"});
}

// Writes files of a failed download, and downloaded files that were not unpacked.
TEST(ForeignFiles, AreNamedWithTheRemedy) {
  Bytes tar(600, 'a');
  std::copy_n("ustar", 5, tar.begin() + 257);
  const auto text = [](const std::string& s) { return Bytes(s.begin(), s.end()); };
  const std::vector<std::pair<Bytes, std::string>> kinds = {
      {text("<!DOCTYPE html><html>404</html>"), "an HTML or XML page"},
      {text("\n  <html lang=\"en\">" + std::string(600, ' ')), "an HTML or XML page"},
      {text("<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code>"), "an HTML or XML page"},
      {text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 26421880\n"),
       "a Git LFS pointer"},
      {text("PK\x03\x04" + std::string(600, 'z')), "a zip archive; unpack it"},
      {tar, "a tar archive"},
      {text("BZh91AY&SY" + std::string(600, 'z')), "bzip2 data"}};
  for (const auto& [bytes, what] : kinds) {
    TemporaryFolder folder;
    write_fashion_mnist(folder);
    const std::string path = folder.path("t10k-labels-idx1-ubyte");
    std::filesystem::remove(path + ".gz");
    write_bytes(path, bytes);
    expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path, what});
    std::filesystem::remove(path);
    write_gzip(path + ".gz", bytes);
    expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path, what});
    write_cifar10(folder, 4, 3);
    write_bytes(folder.path("data_batch_2.bin"), bytes);
    expect_bad_input([&] { load_cifar10(folder.path()); }, {"data_batch_2.bin", what});
    write_bytes(folder.path("model.safetensors"), bytes);
    expect_bad_input([&] { SafetensorsReader(folder.path("model.safetensors")); },
                     {"model.safetensors", what});
  }
}

TEST(FashionMnist, NamesAMissingFileWithTheRemedy) {
  TemporaryFolder folder;
  expect_bad_input([&] { load_fashion_mnist(folder.path()); },
                   {folder.path("train-images-idx3-ubyte.gz"), "no such file", "dataset-fashion-mnist"});
  write_fashion_mnist(folder);
  std::filesystem::remove(folder.path("t10k-labels-idx1-ubyte.gz"));
  expect_bad_input([&] { load_fashion_mnist(folder.path()); },
                   {folder.path("t10k-labels-idx1-ubyte.gz"), "no such file"});
  expect_bad_input([&] { load_fashion_mnist("/nonexistent"); },
                   {"/nonexistent/train-images", "no such file"});
}

TEST(FashionMnist, RejectsTruncatedGzip) {
  TemporaryFolder folder;
  write_fashion_mnist(folder);
  std::string path = folder.path("train-images-idx3-ubyte.gz");
  Bytes whole = read_bytes(path);
  ASSERT_GT(whole.size(), 30u);
  for (size_t keep : {whole.size() - 1, whole.size() - 4, whole.size() - 8, whole.size() - 9,
                      whole.size() / 2, size_t{20}, size_t{11}, size_t{3}, size_t{1}, size_t{0}}) {
    write_bytes(path, Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(keep)));
    SCOPED_TRACE(fmt::format("kept {} of {} bytes", keep, whole.size()));
    expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path});
  }
  write_bytes(path, Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(whole.size() / 2)));
  expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path, "truncated gzip file"});
}

TEST(FashionMnist, RejectsInvalidFiles) {
  const std::string train_images = "train-images-idx3-ubyte.gz", train_labels = "train-labels-idx1-ubyte.gz";
  const Bytes images = idx_images(50, 28, 28);
  Bytes floats = images, shorter = images, longer = images, labels = idx_labels(50);
  floats[2] = 0x0d;
  shorter.pop_back();
  longer.push_back(0);
  labels[8 + 17] = 10;
  struct Case {
    std::string file;
    Bytes bytes;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {train_images, idx_labels(50), {"train-images", "wrong magic", "0x00000801", "0x00000803"}},
      {train_images, floats, {"wrong magic", "0x00000d03"}},
      {train_labels, idx_labels(49), {"train-labels", "49 labels", "50 images"}},
      {train_images, shorter, {"train-images", "39199", "50x28x28 = 39200"}},
      {train_images, longer, {"train-images", "39201"}},
      {train_images, idx({0, 28, 28}, {}), {"train-images", "impossible shape 0"}},
      {train_images, idx({0xffffffff, 0xffffffff, 0xffffffff}, {}), {"train-images", "impossible shape"}},
      {train_images, {0, 0, 8}, {"train-images", "only 3 bytes"}},
      {"t10k-images-idx3-ubyte.gz", idx_images(20, 32, 32), {"28x28", "32x32"}},
      {train_labels, labels, {"train-labels", "label 17 is 10"}}};
  for (const Case& c : cases) {
    TemporaryFolder folder;
    write_fashion_mnist(folder);
    write_gzip(folder.path(c.file), c.bytes);
    expect_bad_input([&] { load_fashion_mnist(folder.path()); }, c.parts);
  }
  TemporaryFolder folder;
  write_fashion_mnist(folder);
  const std::string path = folder.path(train_images);
  Bytes flipped = read_bytes(path);
  flipped[flipped.size() - 6] ^= 1;  // a bit of the checksum
  write_bytes(path, flipped);
  expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {path, "corrupt gzip file"});
  write_bytes(path, Bytes(5000, 'x'));
  expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {"wrong magic", "0x78787878"});
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  expect_bad_input([&] { load_fashion_mnist(folder.path()); }, {train_images, "not a regular file"});
}

TEST(FashionMnist, EnvironmentSetsTheDefaultFolder) {
  TemporaryFolder folder;
  write_fashion_mnist(folder, 30, 10);
  ASSERT_EQ(setenv("GRADWIRE_DATA", folder.path().c_str(), 1), 0);
  EXPECT_EQ(default_fashion_mnist_directory(), folder.path());
  EXPECT_EQ(load_data(DataSpec::parse("fashion-mnist"), VitConfig{}, 0).train.count(), 30);
  std::filesystem::create_directory(folder.path("fashion-mnist"));
  for (const char* name : {"train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"}) {
    std::filesystem::rename(folder.path(name), folder.path(std::string("fashion-mnist/") + name));
  }
  EXPECT_EQ(default_fashion_mnist_directory(), folder.path("fashion-mnist"));
  // Training must use only the data that the user names.
  ASSERT_EQ(setenv("GRADWIRE_DATA", "/nonexistent", 1), 0);
  expect_bad_input([&] { default_fashion_mnist_directory(); },
                   {"GRADWIRE_DATA is '/nonexistent'", "train-images-idx3-ubyte.gz", "unset it"});
  ASSERT_EQ(setenv("GRADWIRE_DATA", "~/data", 1), 0);
  expect_bad_input([&] { default_fashion_mnist_directory(); }, {"GRADWIRE_DATA", "\"$HOME/data\""});
  ASSERT_EQ(unsetenv("GRADWIRE_DATA"), 0);
  EXPECT_EQ(default_fashion_mnist_directory(), "/usr/share/datasets/fashion-mnist");
}

TEST(Cifar10, ReadsBatchesInOrder) {
  TemporaryFolder folder;
  write_cifar10(folder, 4, 3);
  Bytes third = cifar_records(4);
  third[0] = 9;
  write_bytes(folder.path("data_batch_3.bin"), third);
  DataSplits data = load_cifar10(folder.path());
  EXPECT_EQ(data.train.count(), 20);
  EXPECT_EQ(data.test.count(), 3);
  EXPECT_EQ(data.train.channels, 3);
  EXPECT_EQ(data.train.height, 32);
  EXPECT_EQ(data.train.labels,
            (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3, 9, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}));
  for (size_t i = 0; i < data.train.images.size(); ++i) {
    ASSERT_EQ(data.train.images[i], pixel(i / 3072 % 4, i % 3072)) << i;
  }
}

TEST(Cifar10, FindsTheArchivesFolderInItsParent) {
  TemporaryFolder folder;
  write_cifar10(folder);
  std::filesystem::create_directory(folder.path("cifar-10-batches-bin"));
  for (const char* name : {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                           "data_batch_5.bin", "test_batch.bin"}) {
    std::filesystem::rename(folder.path(name), folder.path(std::string("cifar-10-batches-bin/") + name));
  }
  EXPECT_EQ(load_cifar10(folder.path()).train.count(), 20);
}

TEST(Cifar10, NamesBrokenFiles) {
  TemporaryFolder folder;
  expect_bad_input([&] { load_cifar10(folder.path()); },
                   {"data_batch_1.bin", "no such file", "binary version"});
  write_cifar10(folder);
  std::filesystem::remove(folder.path("data_batch_4.bin"));
  expect_bad_input([&] { load_cifar10(folder.path()); }, {"data_batch_4.bin", "no such file"});

  write_cifar10(folder);
  Bytes cut = cifar_records(4);
  cut.pop_back();
  write_bytes(folder.path("test_batch.bin"), cut);
  expect_bad_input([&] { load_cifar10(folder.path()); }, {"test_batch.bin", "whole number of records"});

  write_cifar10(folder);
  write_bytes(folder.path("data_batch_2.bin"), {});
  expect_bad_input([&] { load_cifar10(folder.path()); }, {"data_batch_2.bin", "0 bytes"});

  write_cifar10(folder);
  write_bytes(folder.path("data_batch_5.bin"), cifar_records(3));  // cut at the end of a record
  expect_bad_input([&] { load_cifar10(folder.path()); }, {"data_batch_5.bin", "3 records", "has 4"});

  write_cifar10(folder);
  Bytes labelled = cifar_records(4);
  labelled[3073] = 10;
  write_bytes(folder.path("data_batch_1.bin"), labelled);
  expect_bad_input([&] { load_cifar10(folder.path()); }, {"data_batch_1.bin", "label of record 1 is 10"});
}

TEST(Synthetic, SameSeedSameBytesAndEveryClassOccurs) {
  VitConfig shape;
  DataSplits a = make_synthetic(shape, 100, 50, 7), b = make_synthetic(shape, 100, 50, 7);
  DataSplits c = make_synthetic(shape, 100, 50, 8);
  EXPECT_EQ(a.train.images, b.train.images);
  EXPECT_EQ(a.test.images, b.test.images);
  EXPECT_NE(a.train.images, c.train.images);
  EXPECT_NE(Bytes(a.train.images.begin(), a.train.images.begin() + 784),
            Bytes(a.test.images.begin(), a.test.images.begin() + 784));
  EXPECT_EQ(std::set<int32_t>(a.train.labels.begin(), a.train.labels.end()).size(), 10u);
  // A longer data set begins with the images of the shorter set.
  DataSplits longer = make_synthetic(shape, 101, 50, 7);
  EXPECT_TRUE(std::equal(a.train.images.begin(), a.train.images.end(), longer.train.images.begin()));
}

// Checks that a model can learn the classes: the nearest class mean of the training images must separate the
// test images.
TEST(Synthetic, ClassesAreSeparable) {
  VitConfig shape;
  shape.image = 32;
  shape.patch = 8;
  shape.channels = 3;
  DataSplits data = make_synthetic(shape, 500, 100, 3);
  size_t elements = static_cast<size_t>(data.train.image_elements());
  std::vector<std::vector<double>> means(10, std::vector<double>(elements));
  for (size_t i = 0; i < data.train.labels.size(); ++i) {
    for (size_t e = 0; e < elements; ++e) {
      means[data.train.labels[i]][e] += data.train.images[i * elements + e] / 50.0;
    }
  }
  int right = 0;
  for (size_t i = 0; i < data.test.labels.size(); ++i) {
    size_t nearest = 0;
    double least = INFINITY;
    for (size_t k = 0; k < means.size(); ++k) {
      double distance = 0;
      for (size_t e = 0; e < elements; ++e)
        distance += std::pow(means[k][e] - data.test.images[i * elements + e], 2);
      if (distance < least) least = distance, nearest = k;
    }
    right += static_cast<int32_t>(nearest) == data.test.labels[i];
  }
  EXPECT_GE(right, 90);
}

TEST(Synthetic, TakesItsShapeFromTheModel) {
  DataSplits data = load_data(DataSpec::parse("synthetic:40"), named_model("vit_b_32"), 0);
  EXPECT_EQ(data.train.count(), 40);
  EXPECT_EQ(data.train.image_elements(), 3 * 224 * 224);
  EXPECT_EQ(data.train.classes, 1000);
  EXPECT_GE(load_data(DataSpec::parse("synthetic"), VitConfig{}, 0, 10000).train.count(), 10000);
}

TEST(Statistics, MatchTheDefinition) {
  DataSplits data = make_synthetic(named_model("vit_tiny"), 64, 8, 1);
  double sum = 0, squares = 0;
  for (uint8_t v : data.train.images) sum += v / 255.0, squares += v / 255.0 * (v / 255.0);
  double n = static_cast<double>(data.train.images.size()), mean = sum / n;
  EXPECT_NEAR(data.train.mean[0], mean, 1e-6);
  EXPECT_NEAR(data.train.stddev[0], std::sqrt(squares / n - mean * mean), 1e-6);
  EXPECT_EQ(data.test.mean, data.train.mean);
}

TEST(Statistics, ConstantChannelDoesNotDivideByZero) {
  DataSplits data;
  data.train.channels = data.train.height = data.train.width = 1;
  data.train.images = {7, 7, 7};
  data.train.labels = {0, 0, 0};
  set_statistics(data);
  EXPECT_EQ(data.train.stddev[0], 1.0f);
}

TEST(ModelFit, MismatchesNameTheRemedy) {
  DataSplits data = make_synthetic(VitConfig{}, 10, 10, 0);
  VitConfig model = named_model("vit_b_32");
  expect_bad_input([&] { check_model_fits(model, data.train); },
                   {"vit_b_32", "3x224x224", "1x28x28", "--image-size 28"});
  model = VitConfig{};
  model.classes = 9;
  expect_bad_input([&] { check_model_fits(model, data.train); }, {"9 outputs", "10 classes"});
  check_model_fits(VitConfig{}, data.train);
  data.train.height = 14;
  expect_bad_input([&] { check_model_fits(VitConfig{}, data.train); }, {"14x28", "not square"});
}

}  // namespace
}  // namespace gradwire
