#include "tests/fuzz/files.h"
#include "trainer/data/dataset.h"

namespace gradwire::fuzz {
namespace {

// Returns a .npy file with values 0, 1, 2, ... of one byte.
Bytes npy(const std::string& descr, const std::string& shape, int bytes) {
  const std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
  Bytes file = bytes_of_text("\x93NUMPY");
  file.insert(file.end(), {1, 0, static_cast<uint8_t>(header.size()), 0});
  file.insert(file.end(), header.begin(), header.end());
  for (int i = 0; i < bytes; ++i) file.push_back(static_cast<uint8_t>(i));
  return file;
}

void load_npy(Input images, Input labels) {
  for (const char* split : {"train", "test"}) {
    write_file(std::string("arrays/") + split + "_images.npy", images);
    write_file(std::string("arrays/") + split + "_labels.npy", labels);
  }
  may_refuse([] { load_arrays((scratch() / "arrays").string()); });
}

}  // namespace

void arrays(Input input) {
  load_npy(input, npy("|u1", "(2,)", 2));
  load_npy(npy("|u1", "(2, 1, 4, 4)", 32), input);
}

std::vector<Bytes> arrays_seeds() {
  return {npy("|u1", "(2, 1, 4, 4)", 32), npy("|u1", "(2, 4, 4)", 32), npy("<i8", "(2,)", 16)};
}

}  // namespace gradwire::fuzz
