// Small data files for tests.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"

namespace gradwire::testing {

using Bytes = std::vector<uint8_t>;

inline void write_bytes(const std::string& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

inline Bytes read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

inline void write_gzip(const std::string& path, const Bytes& bytes) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
}

inline void append_be32(Bytes& bytes, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(value >> shift));
}

inline Bytes idx(const std::vector<uint32_t>& shape, const Bytes& values) {
  Bytes bytes;
  append_be32(bytes, 0x00000800u | static_cast<uint32_t>(shape.size()));
  for (uint32_t extent : shape) append_be32(bytes, extent);
  bytes.insert(bytes.end(), values.begin(), values.end());
  return bytes;
}

inline uint8_t pixel(size_t image, size_t at) {
  return static_cast<uint8_t>(image * 37 + at * 11 + 5);
}

inline Bytes idx_images(uint32_t count, uint32_t height, uint32_t width) {
  Bytes values;
  for (size_t i = 0; i < count; ++i) {
    for (size_t p = 0; p < size_t{height} * width; ++p) values.push_back(pixel(i, p));
  }
  return idx({count, height, width}, values);
}

inline Bytes idx_labels(uint32_t count) {
  Bytes values;
  for (uint32_t i = 0; i < count; ++i) values.push_back(static_cast<uint8_t>(i % 10));
  return idx({count}, values);
}

inline void write_fashion_mnist(const TemporaryFolder& folder, uint32_t train = 50, uint32_t test = 20,
                                uint32_t size = 28) {
  write_gzip(folder.path("train-images-idx3-ubyte.gz"), idx_images(train, size, size));
  write_gzip(folder.path("train-labels-idx1-ubyte.gz"), idx_labels(train));
  write_gzip(folder.path("t10k-images-idx3-ubyte.gz"), idx_images(test, size, size));
  write_gzip(folder.path("t10k-labels-idx1-ubyte.gz"), idx_labels(test));
}

inline Bytes cifar_records(size_t count) {
  Bytes bytes;
  for (size_t i = 0; i < count; ++i) {
    bytes.push_back(static_cast<uint8_t>(i % 10));
    for (size_t p = 0; p < 3072; ++p) bytes.push_back(pixel(i, p));
  }
  return bytes;
}

inline void write_cifar10(const TemporaryFolder& folder, size_t per_batch = 4, size_t test = 3) {
  for (int b = 1; b <= 5; ++b) {
    write_bytes(folder.path(fmt::format("data_batch_{}.bin", b)), cifar_records(per_batch));
  }
  write_bytes(folder.path("test_batch.bin"), cifar_records(test));
}

// Expects `action` to throw BadInput with a one-line text that contains all `parts`.
inline void expect_bad_input(const std::function<void()>& action, const std::vector<std::string>& parts,
                             std::source_location at = std::source_location::current()) {
  const std::string text = expect_error<BadInput>(action, parts, at);
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

}  // namespace gradwire::testing
