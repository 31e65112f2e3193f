// vit_oracle [--device host|cuda:N] [--gelu exact|tanh] INPUT OUTPUT: runs one forward and backward pass of
// Gradwire's ViT on the weights, images and labels of vit_oracle_test.py, for comparison with torchvision.
// Both files hold little-endian values, without padding:
//   INPUT   int64 x 9: image, channels, patch, width, depth, heads, mlp, classes, batch; every parameter as
//           float32 in torchvision's shape, in the order of `vit_oracle --names` for the same sizes; images
//           float32 (batch, channels, image, image); labels int32 (batch)
//   OUTPUT  mean loss float64; logits float32 (batch, classes); every parameter's gradient float32, in that
//           order
// vit_oracle --names SIZES...: the parameter names, one a line, for the first eight of the numbers above.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "tests/oracles/binary_io.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

VitConfig config_from(const std::vector<int64_t>& sizes) {
  VitConfig config;
  int32_t* fields[] = {&config.image, &config.channels, &config.patch, &config.width,
                       &config.depth, &config.heads,    &config.mlp,   &config.classes};
  for (size_t i = 0; i < 8; ++i) *fields[i] = static_cast<int32_t>(sizes.at(i));
  config.name = "oracle";
  check_model(config);
  return config;
}

using oracle::Reader;
using oracle::Writer;

void run(Device device, Gelu gelu, const std::string& input, const std::string& output) {
  Reader in(input);
  std::vector<int64_t> sizes(9);
  in.read(sizes.data(), 9);
  VitConfig config = config_from(sizes);
  config.gelu = gelu;
  const int64_t batch = sizes[8];
  const std::vector<VitParameter> parameters = vit_parameters(config);
  const ParameterLayout layout = packed_layout(parameters);

  std::vector<float> weights(layout.elements);
  for (size_t i = 0; i < parameters.size(); ++i)
    in.read(weights.data() + layout.offsets[i], parameters[i].elements());
  std::vector<float> images(batch * config.channels * config.image * config.image);
  in.read(images.data(), static_cast<int64_t>(images.size()));
  std::vector<int32_t> labels(batch);
  in.read(labels.data(), batch);

  Stream stream = Stream::create(device, "oracle");
  Vit vit(config, stream, layout, {.max_batch = batch});
  vit.load(weights);
  Buffer device_images = make_buffer<float>(device, static_cast<int64_t>(images.size()));
  Buffer device_labels = make_buffer<int32_t>(device, batch);
  Buffer totals = make_buffer<double>(device, 2);
  Buffer gradients = make_buffer<float>(device, layout.elements);
  to_device(stream, device_images.as<float>(), std::span<const float>(images));
  to_device(stream, device_labels.as<int32_t>(), std::span<const int32_t>(labels));
  fill_zero(stream, totals.data(), totals.bytes());

  vit.forward(device_images.as<float>(), batch);
  std::vector<float> logits = to_host(stream, vit.logits(), batch * config.classes);
  vit.backward(device_labels.as<int32_t>(), totals.as<double>(), 1.0f / static_cast<float>(batch),
               gradients.as<float>(), false, {});
  std::vector<float> flat = to_host(stream, gradients.as<const float>(), layout.elements);
  const double loss = to_host(stream, totals.as<const double>(), 2)[0] / static_cast<double>(batch);

  Writer out(output);
  out.write(&loss, 1);
  out.write(logits.data(), static_cast<int64_t>(logits.size()));
  for (size_t i = 0; i < parameters.size(); ++i)
    out.write(flat.data() + layout.offsets[i], parameters[i].elements());
  out.close();
}

Device parse_device(const std::string& text) {
  if (text == "host") return Device::host();
  if (text.starts_with("cuda:")) return Device::cuda(std::stoi(text.substr(5)));
  throw BadInput("--device " + text + ": use host or cuda:N");
}

int main_inner(std::vector<std::string> args) {
  if (args.size() == 9 && args[0] == "--names") {
    std::vector<int64_t> sizes;
    for (size_t i = 1; i < args.size(); ++i) sizes.push_back(std::stoll(args[i]));
    for (const VitParameter& parameter : vit_parameters(config_from(sizes)))
      std::puts(parameter.name.c_str());
    return 0;
  }
  Device device = Device::host();
  Gelu gelu = Gelu::exact;
  for (; args.size() > 2; args.erase(args.begin(), args.begin() + 2)) {
    if (args[0] == "--device") {
      device = parse_device(args[1]);
    } else if (args[0] == "--gelu" && args[1] == "tanh") {
      gelu = Gelu::tanh;
    } else if (args[0] != "--gelu" || args[1] != "exact") {
      break;
    }
  }
  if (args.size() != 2)
    throw BadInput("usage: vit_oracle [--device host|cuda:N] [--gelu exact|tanh] INPUT OUTPUT");
  run(device, gelu, args[0], args[1]);
  return 0;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  return gradwire::oracle::run(argc, argv, gradwire::main_inner);
}
