// PyTorch's hook in a child process. The two sides take turns: one waits while the other runs.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "collectives/spec/spec.h"

namespace gradwire::bench {

class PyTorchBaseline {
 public:
  // Starts `python` on bench/baselines/pytorch_hook.py with `data`, the tensors' values one after the other.
  // Throws BadInput when there is no such program or it has no torch.
  PyTorchBaseline(const std::string& python, Device device, int threads,
                  const std::vector<GradientTensor>& tensors, std::span<const float> data);
  ~PyTorchBaseline();
  PyTorchBaseline(const PyTorchBaseline&) = delete;

  // True when PyTorch has a corresponding hook.
  static bool has(const CompressionSpec& spec);
  // Sets up PyTorch's hook for `spec` and warms it up; returns its description.
  std::string prepare(const CompressionSpec& spec);
  // torch.linalg.qr of every tensor instead of a hook, tensors of one shape in one batched call.
  std::string prepare_qr();
  // One call of the hook on fresh data, in milliseconds.
  double run_ms();

 private:
  nlohmann::json ask(const std::string& command);
  nlohmann::json read_answer();

  std::string python_;
  int pid_ = -1, to_ = -1, from_ = -1, errors_ = -1;
  std::string received_;
};

}  // namespace gradwire::bench
