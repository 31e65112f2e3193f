// A training step as in a framework: compresses gradients with PowerSGD and error feedback, reduces buckets
// while backward computes the next gradients, and saves the reducer's state.
//
// Runs two ranks as threads; `overlap RENDEZVOUS RANK WORLD` runs one rank of several processes.
#include <gradwire/gradwire.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void check(gw_status status) {
  if (status != GW_OK)
    throw std::runtime_error(std::string(gw_status_string(status)) + ": " + gw_last_error());
}

struct Layer {
  const char* name;
  int64_t rows, cols;
};

// The layers in the order in which backward completes their gradients: last layer first.
const Layer kLayers[] = {{"head.weight", 10, 256},
                         {"head.bias", 10, 1},
                         {"body.weight", 256, 512},
                         {"body.bias", 256, 1},
                         {"stem.weight", 512, 64}};

gw_comm connect(const char* rendezvous, int rank, int world) {
  gw_comm comm = nullptr;
  gw_comm_options group{};
  group.size = sizeof group;
  group.rendezvous = rendezvous;
  group.rank = rank;
  group.world = world;
  group.device = GW_HOST;
  group.timeout_ms = 60'000;
  check(gw_comm_create(&group, &comm));
  return comm;
}

// Returns the tensors of one flat buffer. Contiguous tensors are reduced in place, without copies.
std::vector<gw_tensor> describe(float* gradients) {
  std::vector<gw_tensor> tensors;
  for (const Layer& l : kLayers) {
    gw_tensor t{};
    t.size = sizeof t;
    t.name = l.name;
    t.rows = l.rows;
    t.cols = l.cols;
    t.dtype = GW_FLOAT32;
    t.grad = gradients;
    tensors.push_back(t);
    gradients += l.rows * l.cols;
  }
  return tensors;
}

// Replaces the backward of a layer: writes values that differ between ranks and have low rank.
void compute_gradient(const gw_tensor& tensor, int rank, int step) {
  auto* gradient = static_cast<float*>(tensor.grad);
  for (int64_t r = 0; r < tensor.rows; ++r) {
    for (int64_t c = 0; c < tensor.cols; ++c) {
      gradient[r * tensor.cols + c] =
          std::sin(static_cast<float>(r + rank)) * std::cos(static_cast<float>(c + step));
    }
  }
}

// Checks the averaged gradient of body.weight. The gradient has rank 2, so PowerSGD of rank 4 is exact except
// for rounding.
void check_average(const gw_tensor& tensor, int world, int step) {
  for (int64_t r = 0; r < tensor.rows; ++r) {
    double mean = 0;
    for (int k = 0; k < world; ++k) mean += std::sin(static_cast<double>(r + k)) / world;
    const float want = static_cast<float>(mean * std::cos(static_cast<double>(step)));
    const float got = static_cast<float*>(tensor.grad)[r * tensor.cols];
    if (std::abs(got - want) > 1e-3f) throw std::runtime_error("row " + std::to_string(r) + " is wrong");
  }
}

void save_and_load_state(gw_reducer reducer) {
  size_t size = 0;
  check(gw_reducer_state_save(reducer, nullptr, 0, &size));
  std::vector<char> checkpoint(size);
  check(gw_reducer_state_save(reducer, checkpoint.data(), checkpoint.size(), &size));
  check(gw_reducer_state_load(reducer, checkpoint.data(), checkpoint.size()));
}

void run(const char* rendezvous, int rank, int world) {
  gw_comm comm = connect(rendezvous, rank, world);
  int64_t elements = 0;
  for (const Layer& l : kLayers) elements += l.rows * l.cols;
  std::vector<float> gradients(elements);
  const std::vector<gw_tensor> tensors = describe(gradients.data());
  gw_reducer_options options{};
  options.size = sizeof options;
  options.bucket_bytes = 256 << 10;
  gw_reducer reducer = nullptr;
  check(gw_reducer_create(comm, "powersgd:rank=4", tensors.data(), static_cast<int32_t>(tensors.size()),
                          &options, &reducer));

  const int steps = 20;
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      compute_gradient(tensors[i], rank, step);
      check(gw_reducer_ready(reducer, static_cast<int32_t>(i), nullptr));  // does not block
    }
    check(gw_reducer_wait(reducer, nullptr, nullptr));
    // The gradients are now averaged, with the same bits on every rank.
  }
  check_average(tensors[2], world, steps - 1);

  gw_stats stats{};
  stats.size = sizeof stats;
  check(gw_reducer_stats(reducer, &stats));
  std::printf("rank %d: %lld steps, %llu bytes sent in the last one, %llu without compression\n", rank,
              static_cast<long long>(stats.steps), static_cast<unsigned long long>(stats.wire_bytes),
              static_cast<unsigned long long>(stats.dense_bytes));
  save_and_load_state(reducer);
  check(gw_reducer_destroy(reducer));
  check(gw_comm_destroy(comm));
}

void guarded(const char* rendezvous, int rank, int world) {
  try {
    run(rendezvous, rank, world);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4) {
    guarded(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
    return 0;
  }
  std::thread other(guarded, "local://example", 1, 2);
  guarded("local://example", 0, 2);
  other.join();
}
