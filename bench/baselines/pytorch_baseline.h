// PyTorch's hook in a child process. The two processes alternate: each process waits while the other
// process runs.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "collectives/spec/spec.h"
#include "runtime/threads/child_process.h"
#include "runtime/util/file.h"

namespace gradwire::bench {

class PyTorchBaseline {
 public:
  // Starts `python` with bench/baselines/pytorch_hook.py. `data`: the tensors' values, one tensor after
  // another. Throws BadInput if the program does not exist or has no torch.
  PyTorchBaseline(const std::string& python, Device device, int threads,
                  const std::vector<GradientTensor>& tensors, std::span<const float> data);
  PyTorchBaseline(const PyTorchBaseline&) = delete;

  // Returns whether PyTorch has a corresponding hook.
  static bool has(const CompressionSpec& spec);
  // Sets up PyTorch's hook for `spec` and warms it up. Returns its description.
  std::string prepare(const CompressionSpec& spec);
  // Sets up torch.linalg.qr instead of a hook, with one batched call for all tensors of one shape. Returns
  // the description.
  std::string prepare_qr();
  // Returns the milliseconds of one call of the hook on fresh data.
  double run_ms();

 private:
  nlohmann::json ask(const std::string& command);
  nlohmann::json read_answer();

  std::string python_;
  FileDescriptor to_, from_, errors_;
  std::optional<ChildProcess> process_;
  std::string received_;
};

}  // namespace gradwire::bench
