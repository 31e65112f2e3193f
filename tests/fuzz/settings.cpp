#include <stdexcept>
#include <string>

#include "collectives/spec/spec.h"
#include "tests/fuzz/files.h"
#include "trainer/config/config.h"

namespace gradwire::fuzz {
namespace {

// Checks that an accepted value, once printed, parses to the same value.
template <typename T>
void round_trip(const std::string& text) {
  may_refuse([&] {
    const T value = T::parse(text);
    const std::string printed = value.to_string();
    T again;
    try {
      again = T::parse(printed);
    } catch (const BadInput& error) {
      throw std::logic_error("accepted as '" + text + "' but not as '" + printed + "': " + error.what());
    }
    if (!(again == value)) throw std::logic_error("'" + text + "' and '" + printed + "' differ");
  });
}

}  // namespace

void settings(Input input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  round_trip<CompressionSpec>(text);
  round_trip<DataSpec>(text);
  round_trip<Augmentation>(text);
  may_refuse([&] {
    const StepRange range = StepRange::parse("--trace-steps", text);
    if (!(StepRange::parse("--trace-steps", range.to_string()) == range)) throw std::logic_error(text);
  });
}

std::vector<Bytes> settings_seeds() {
  std::vector<Bytes> seeds;
  for (const char* text : {"fp32", "bf16:round=stochastic,schedule=ring,intra_node=fp32",
                           "int4:block=64,rotate=hadamard,dense=auto", "topk:k=64,of=4096,values=int8",
                           "eden:bits=3,ef=off,residual=bf16", "qsgd", "nvfp4:dense=head.*+a",
                           "powersgd:rank=4,wire=bf16,start=10,warm=off,min_ratio=1.5,seed=7",
                           "powersgd:alternate=on", "topk:start=5,k=41,ef_decay=0.9,ramp=100,momentum=0.9",
                           "int8:ef=ef21,max_norm=0.5", "randk:ratio=0.05,wire=int8,seed=3",
                           "fashion-mnist:/a/folder", "synthetic:1000", "flip,crop", "10:20"}) {
    seeds.push_back(bytes_of_text(text));
  }
  return seeds;
}

}  // namespace gradwire::fuzz
