#include "kernels/gemm/tuning.h"

#include <stdexcept>
#include <string>

#include "tests/fuzz/files.h"

namespace gradwire::fuzz {
namespace {

constexpr std::string_view kHeader = "gradwire tuning 1";
const TuningFile::Key kProduct{"H100", "cublasLt 130100", "NT 16 40 10"};

void ignore(const std::string&) {}

}  // namespace

void tuning(Input input) {
  const std::string path = write_file("tuning", input);
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  const bool ours = text.empty() || text.substr(0, text.find('\n')) == kHeader;
  // Makes two consecutive runs that choose differently. The second run must find the first run's choice.
  std::string chosen[2];
  for (int run = 0; run < 2; ++run) {
    TuningFile file(path, ignore);
    // Parses the value as a cuBLASLt product parses its algorithm.
    unsigned char bytes[8] = {};
    const auto found = file.find(kProduct);
    if (run == 1 && ours && !found)
      throw std::logic_error("the second run does not find the choice of the first");
    if (found && from_hex_bytes(*found, bytes, sizeof bytes) && hex_bytes(bytes, sizeof bytes) != *found) {
      throw std::logic_error("hexadecimal digits do not survive a round trip: " + *found);
    }
    chosen[run] = found.value_or(run == 0 ? "00ff" : "ff00");
    if (!found) file.add(kProduct, chosen[run]);
  }
  if (ours && chosen[0] != chosen[1]) throw std::logic_error("the second run makes another choice");
  if (!ours && read_whole(path) != Bytes(input.begin(), input.end())) {
    throw std::logic_error("a foreign file was overwritten");
  }
}

std::vector<Bytes> tuning_seeds() {
  const std::string header = std::string(kHeader) + "\n";
  const std::string product =
      kProduct.device + "\t" + kProduct.maker + "\t" + kProduct.kind + "\t00010a7f80ff0310\n";
  const std::string other = kProduct.device + "\tanother 1\t2*4096x1024\tword\n";
  return {bytes_of_text(""),
          bytes_of_text(header),
          bytes_of_text(header + product + other),
          bytes_of_text(header + other.substr(0, other.size() - 5) + "\n"),
          bytes_of_text(header + product.substr(0, product.size() / 2)),
          bytes_of_text("my thesis\n")};
}

}  // namespace gradwire::fuzz
