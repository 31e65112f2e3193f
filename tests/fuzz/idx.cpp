#include "tests/fuzz/files.h"
#include "trainer/data/dataset.h"

namespace gradwire::fuzz {
namespace {

// Returns two images of 4x4, and their labels.
Bytes images() {
  Bytes bytes{0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4};
  for (int i = 0; i < 32; ++i) bytes.push_back(static_cast<uint8_t>(8 * i));
  return bytes;
}
Bytes labels() {
  return {0, 0, 8, 1, 0, 0, 0, 2, 3, 9};
}

void load(Input images, Input labels) {
  for (const char* split : {"train", "t10k"}) {
    write_file(std::string("idx/") + split + "-images-idx3-ubyte", images);
    write_file(std::string("idx/") + split + "-labels-idx1-ubyte", labels);
  }
  may_refuse([] { load_fashion_mnist((scratch() / "idx").string()); });
}

}  // namespace

void idx(Input input) {
  load(input, labels());
  load(images(), input);
}

std::vector<Bytes> idx_seeds() {
  // The labels 3 and 9, compressed by gzip -n.
  const Bytes gzip{0x1f, 0x8b, 8,    0,    0,    0,    0,    0,    0,    3, 0x63,
                   0x60, 0xe0, 0x60, 0x64, 0x60, 0x60, 0x60, 0x62, 0xe6, 4, 0};
  return {images(), labels(), gzip};
}

}  // namespace gradwire::fuzz
