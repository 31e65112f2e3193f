#include "trainer/data/safetensors.h"

#include <vector>

#include "tests/fuzz/files.h"

namespace gradwire::fuzz {

void safetensors(Input input) {
  const std::string path = write_file("any.safetensors", input);
  may_refuse([&] {
    const SafetensorsReader file(path);
    uint64_t bytes = 0;
    for (const SafetensorsReader::Tensor& tensor : file.tensors()) {
      bytes += tensor.bytes;
      std::vector<std::byte> data(tensor.bytes);
      file.read_bytes(tensor, 0, data);
      if (file.find(tensor.name) == nullptr) throw std::logic_error("a tensor that cannot be found");
      if (tensor.dtype != "F32") continue;
      std::vector<float> values(tensor.elements);
      file.read(tensor, 0, values);
    }
    if (bytes > input.size()) throw std::logic_error("tensors larger than their file");
    file.verify(false);
    file.verify(true);
  });
}

std::vector<Bytes> safetensors_seeds() {
  const std::string path = (scratch() / "seed.safetensors").string();
  std::filesystem::remove(path);
  SafetensorsWriter writer(path, {{"made_by", "a test"}},
                           {{"a", {2, 3}}, {"half", {5}, DType::bf16}, {"empty", {0, 4}}, {"scalar", {}}});
  const std::vector<float> values(16, 0.5f);
  writer.write(std::span(values).first(6));
  writer.write(std::as_bytes(std::span(values)).first(10));
  writer.write(std::span(values).first(1));
  writer.finish();
  return {read_whole(path)};
}

}  // namespace gradwire::fuzz
