#include "trainer/train/agreement.h"

#include <zlib.h>

#include <bit>
#include <sstream>

#include "kernels/simd/vector.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/log/records.h"
#include "trainer/measure/peaks.h"

namespace gradwire {
namespace {

// Returns a checksum of the images and labels, because two files with the same path may differ.
uint32_t checksum(const Dataset& data) {
  const auto* labels = reinterpret_cast<const unsigned char*>(data.labels.data());
  const uLong images = crc32_z(0, data.images.data(), data.images.size());
  return static_cast<uint32_t>(crc32_z(images, labels, data.labels.size() * sizeof data.labels[0]));
}

// Describes a rank's arithmetic. Ranks with different arithmetic would compute different weights.
std::string arithmetic(const TrainConfig& config) {
  if (!config.devices[0].is_host()) return "the GPU's";
  return fmt::format("{}, {}, Gradwire {}", simd_level(), host_products_text(), GRADWIRE_VERSION);
}

}  // namespace

std::string described_data(const DataSplits& data) {
  return fmt::format("\"images\": {} and {} with checksums {:08x} and {:08x}", data.train.count(),
                     data.test.count(), checksum(data.train), checksum(data.test));
}

std::string described_run(const TrainConfig& config, const std::string& data) {
  return fmt::format("{}\n{}\n\"arithmetic\": {}", config_text(config), data, arithmetic(config));
}

std::string first_difference(const std::string& remote, const std::string& local) {
  std::istringstream left(remote), right(local);
  std::string a, b;
  auto trimmed = [](const std::string& line) {
    size_t begin = line.find_first_not_of(' ');
    size_t end = line.find_last_not_of(" ,");
    return begin == std::string::npos ? "nothing" : line.substr(begin, end - begin + 1);
  };
  while (true) {
    bool more_left = static_cast<bool>(std::getline(left, a));
    bool more_right = static_cast<bool>(std::getline(right, b));
    if (!more_left && !more_right) return "";
    if (!more_left) a.clear();
    if (!more_right) b.clear();
    if (a != b) return fmt::format("{} there, {} here", trimmed(a), trimmed(b));
  }
}

void check_agreement(const std::string& local, Communicator& comm) {
  if (comm.rank() != 0) return comm.send_message(local);
  for (int rank = 1; rank < comm.world(); ++rank) {
    const std::string remote = comm.take_message(rank);
    if (remote == local) continue;
    throw BadInput(
        "rank {} was started with other settings or data than rank 0: {}; give all processes the "
        "same flags and data",
        rank, first_difference(remote, local));
  }
}

uint64_t parameter_hash(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  return hash;
}

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

}  // namespace gradwire
