#include <fmt/format.h>

#include "tests/fuzz/files.h"
#include "trainer/data/dataset.h"

namespace gradwire::fuzz {

void cifar(Input input) {
  for (int batch = 1; batch <= 5; ++batch) write_file(fmt::format("cifar/data_batch_{}.bin", batch), input);
  write_file("cifar/test_batch.bin", input);
  may_refuse([] { load_cifar10((scratch() / "cifar").string()); });
}

std::vector<Bytes> cifar_seeds() {
  Bytes records(2 * 3073, 7);
  records[3073] = 9;
  return {records};
}

}  // namespace gradwire::fuzz
