// A LibTorch program that averages its gradients with libgradwire. Usage: train RENDEZVOUS RANK WORLD
//
// LibTorch exports the symbols of its Gloo. A library that exports the same symbols would use LibTorch's
// version of Gloo, and crash in its first connection.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>

#include <gradwire/gradwire.h>

namespace {

void require(gw_status status) {
  if (status == GW_OK) return;
  std::fprintf(stderr, "gradwire: %s\n", gw_last_error());
  std::exit(1);
}

}  // namespace

int main(int, char** argv) {
  const int rank = std::atoi(argv[2]), world = std::atoi(argv[3]);
  gw_comm comm{};
  gw_comm_options options{};
  options.size = sizeof options;
  options.rendezvous = argv[1];
  options.rank = rank;
  options.world = world;
  options.device = GW_HOST;
  options.timeout_ms = 60000;
  require(gw_comm_create(&options, &comm));

  torch::manual_seed(7);  // the same weights on every rank
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  torch::manual_seed(100 + rank);  // different examples on each rank
  double first = 0, loss = 0;
  for (int step = 0; step < 100; ++step) {
    const torch::Tensor x = torch::randn({64, 16}), y = x.sum(1, /*keepdim=*/true) / 4;
    optimizer.zero_grad();
    torch::Tensor mse = torch::nn::functional::mse_loss(model->forward(x), y);
    mse.backward();
    for (const torch::Tensor& p : model->parameters()) {
      torch::Tensor gradient = p.grad();
      require(gw_allreduce(comm, gradient.data_ptr<float>(), gradient.numel(), GW_FLOAT32, GW_AVG,
                           "int8:schedule=ring", nullptr, nullptr));
    }
    optimizer.step();
    torch::Tensor mean = mse.detach().clone();
    require(gw_allreduce(comm, mean.data_ptr<float>(), 1, GW_FLOAT32, GW_AVG, "fp32", nullptr, nullptr));
    loss = mean.item<double>();
    if (step == 0) first = loss;
  }
  double sum = 0;
  for (const torch::Tensor& p : model->parameters())
    sum += p.detach().to(torch::kDouble).abs().sum().item<double>();
  std::printf("first %.6f last %.6f weights %.17g\n", first, loss, sum);
  require(gw_comm_destroy(comm));
  return 0;
}
