#include "kernels/gemm/tuning.h"

#include <stdexcept>
#include <string>

#include "collectives/codec/powersgd_choice.h"
#include "kernels/powersgd/powersgd.h"
#include "tests/fuzz/files.h"

namespace gradwire::fuzz {
namespace {

constexpr std::string_view kHeader = "gradwire tuning 1";
constexpr const char *kDevice = "H100", *kLibrary = "cuBLAS 13";
const TuningFile::Key kProduct{kDevice, "cublasLt 130100", "NT 16 40 10"};

void ignore(const std::string&) {}

const PowerSgdPass& pass() {
  static const MatrixTable table(Stream::immediate_host(),
                                 {{.rows = 12, .cols = 8, .rank = 4}, {.rows = 5, .cols = 7, .rank = 2}});
  static const PowerSgdPass one{PowerSgdPass::project, &table, true};
  return one;
}

}  // namespace

void tuning(Input input) {
  const std::string path = write_file("tuning", input);
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  const bool ours = text.empty() || text.substr(0, text.find('\n')) == kHeader;
  // Two consecutive runs, in which different choices are faster. The second must find the first one's choice.
  bool chosen[2] = {}, measured[2] = {};
  for (int run = 0; run < 2; ++run) {
    TuningFile file(path, ignore);
    // Parses the value as a cuBLASLt product parses its algorithm.
    unsigned char bytes[8] = {};
    const auto found = file.find(kProduct);
    if (found && from_hex_bytes(*found, bytes, sizeof bytes) && hex_bytes(bytes, sizeof bytes) != *found) {
      throw std::logic_error("hexadecimal digits do not survive a round trip: " + *found);
    }
    chosen[run] = find_or_measure(file, kDevice, kLibrary, pass(), [&] {
      measured[run] = true;
      return run == 0 ? PassTimes{20, 10} : PassTimes{10, 20};
    });
  }
  if (ours && measured[1]) throw std::logic_error("the second run does not find the choice of the first");
  if (ours && chosen[0] != chosen[1]) throw std::logic_error("the second run makes another choice");
  if (!ours && read_whole(path) != Bytes(input.begin(), input.end())) {
    throw std::logic_error("a foreign file was overwritten");
  }
}

std::vector<Bytes> tuning_seeds() {
  const std::string header = std::string(kHeader) + "\n";
  const std::string product =
      kProduct.device + "\t" + kProduct.maker + "\t" + kProduct.kind + "\t00010a7f80ff0310\n";
  const std::string products =
      std::string(kDevice) + "\tpowersgd 1, " + kLibrary + "\t" + pass().text() + "\tlibrary\n";
  return {bytes_of_text(""),
          bytes_of_text(header),
          bytes_of_text(header + product + products),
          bytes_of_text(header + products.substr(0, products.size() - 8) + "fused\n"),
          bytes_of_text(header + product.substr(0, product.size() / 2)),
          bytes_of_text("my thesis\n")};
}

}  // namespace gradwire::fuzz
