// muon_oracle INPUT OUTPUT: runs the trainer's Muon on the matrices and gradients of muon_oracle_test.py.
// Both files hold little-endian values, without padding:
//   INPUT   int64: steps, matrices; double: mu; per matrix int64 rows, cols; then float32 gradients by
//           [step][matrix]
//   OUTPUT  float32 steps by [step][matrix]
#include <vector>

#include "tests/oracles/binary_io.h"
#include "trainer/train/optimizer_state.h"

namespace gradwire {
namespace {

int main_inner(std::vector<std::string> args) {
  if (args.size() != 2) throw BadInput("usage: muon_oracle INPUT OUTPUT");
  oracle::Reader in(args[0]);
  const auto steps = in.read<int64_t>(), count = in.read<int64_t>();
  const double mu = in.read<double>();
  std::vector<FlatMatrix> matrices;
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto rows = in.read<int64_t>(), cols = in.read<int64_t>();
    matrices.push_back({elements, rows, cols});
    elements += (rows * cols + 3) / 4 * 4;
  }
  const Stream stream = Stream::create(Device::host(), "compute");
  Muon muon(stream, matrices, elements, mu, Precision::fp32);
  std::vector<float> gradients(static_cast<size_t>(elements)), momentum(gradients.size());
  oracle::Writer out(args[1]);
  for (int64_t s = 0; s < steps; ++s) {
    for (const FlatMatrix& m : matrices) in.read(gradients.data() + m.begin, m.rows * m.cols);
    muon.run(stream, gradients.data(), momentum.data());
    stream.synchronize();
    for (const FlatMatrix& m : matrices) out.write(muon.steps() + m.begin, m.rows * m.cols);
  }
  out.close();
  return 0;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  return gradwire::oracle::run(argc, argv, gradwire::main_inner);
}
