// powersgd_oracle [--device host|cuda:N] [--spec SPEC] INPUT OUTPUT: runs Gradwire's PowerSGD, or another
// codec with factors, on the gradients of powersgd_oracle_test.py or dion_oracle_test.py. Ranks are threads.
// Both files hold little-endian values, without padding:
//   INPUT   int64: world, steps, rank, start, tensors; per tensor: dimensions, extents; then float32
//           gradients by [step][rank][tensor]
//   OUTPUT  per tensor int64 elements of its first Q (0: left dense) and that Q as float32; then float32
//           averaged gradients by [step][tensor], as rank 0 holds them
#include <fmt/format.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "tests/oracles/binary_io.h"

namespace gradwire {
namespace {

struct Problem {
  int64_t world, steps, rank, start;
  std::vector<GradientTensor> tensors;
  std::vector<int64_t> counts;
  std::vector<float> gradients;
  int64_t per_rank = 0;

  explicit Problem(const std::string& path) {
    oracle::Reader in(path);
    world = in.read<int64_t>();
    steps = in.read<int64_t>();
    rank = in.read<int64_t>();
    start = in.read<int64_t>();
    tensors.resize(static_cast<size_t>(in.read<int64_t>()));
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].name = fmt::format("t{}", i);
      tensors[i].shape.resize(static_cast<size_t>(in.read<int64_t>()));
      in.read(tensors[i].shape.data(), static_cast<int64_t>(tensors[i].shape.size()));
      counts.push_back(tensors[i].count());
      per_rank += counts.back();
    }
    gradients.resize(static_cast<size_t>(steps * world * per_rank));
    in.read(gradients.data(), static_cast<int64_t>(gradients.size()));
  }
};

void run_rank(const Problem& problem, const std::string& text, Communicator& comm,
              const std::string& output) {
  Stream stream = Stream::create(comm.device(), "compute");
  const CompressionSpec spec = CompressionSpec::parse(
      text.empty() ? fmt::format("powersgd:rank={},start={}", problem.rank, problem.start) : text);
  Reducer reducer(comm, spec, problem.tensors, {.bucket_bytes = int64_t{1} << 40});
  std::vector<std::vector<float>> averaged;
  oracle::Writer out(comm.rank() == 0 ? output : "/dev/null");
  for (int i = 0; i < reducer.tensors(); ++i) {
    std::vector<float> q;
    for (const TensorState& s : reducer.tensor_state()) {
      if (s.tensor == i && s.kind == "factor") {
        q = to_host(stream, static_cast<const float*>(s.data), s.count());
      }
    }
    int64_t count = static_cast<int64_t>(q.size());
    out.write(&count, 1);
    out.write(q.data(), count);
  }
  for (int64_t s = 0; s < problem.steps; ++s) {
    const float* from = problem.gradients.data() + (s * problem.world + comm.rank()) * problem.per_rank;
    for (int i = 0; i < reducer.tensors(); ++i) {
      copy(stream, reducer.gradient(i), from, static_cast<size_t>(problem.counts[i]) * sizeof(float));
      reducer.ready(i, stream);
      from += problem.counts[i];
    }
    reducer.wait(stream);
    for (int i = 0; i < reducer.tensors(); ++i) {
      auto result = to_host(stream, static_cast<const float*>(reducer.gradient(i)), problem.counts[i]);
      out.write(result.data(), problem.counts[i]);
    }
  }
  out.close();
}

int main_inner(std::vector<std::string> args) {
  Device device = Device::host();
  std::string spec;
  while (args.size() >= 4) {
    if (args[0] == "--spec") spec = args[1];
    if (args[1].starts_with("cuda:")) device = Device::cuda(std::stoi(args[1].substr(5)));
    args.erase(args.begin(), args.begin() + 2);
  }
  if (args.size() != 2)
    throw BadInput("usage: powersgd_oracle [--device host|cuda:N] [--spec SPEC] INPUT OUTPUT");
  Problem problem(args[0]);
  auto group = Communicator::create_local(std::vector<Device>(static_cast<size_t>(problem.world), device),
                                          std::chrono::seconds(60));
  std::vector<std::exception_ptr> errors(group.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < group.size(); ++r) {
    ranks.emplace_back([&, r] {
      try {
        run_rank(problem, spec, *group[r], args[1]);
      } catch (const std::exception& error) {
        errors[r] = std::current_exception();
        group[r]->abort(error.what());
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return 0;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  return gradwire::oracle::run(argc, argv, gradwire::main_inner);
}
