// gw_choose().
#include "collectives/reducer/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collectives/agreement/statements.h"
#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "collectives/c_api/structs.h"

namespace gradwire::c_api {
namespace {

constexpr int32_t kMostSpecs = 1000;

std::vector<CompressionSpec> read_specs(const gw_choose_options& o) {
  require(o.n_specs >= 1 && o.n_specs <= kMostSpecs, "n_specs is {}; it must be from 1 to {}", o.n_specs,
          kMostSpecs);
  require(o.specs != nullptr, "specs is null; pass {} specs", o.n_specs);
  std::vector<CompressionSpec> specs;
  for (int32_t i = 0; i < o.n_specs; ++i) {
    require(o.specs[i] != nullptr, "specs[{}] is null", i);
    const CompressionSpec& spec = specs.emplace_back(CompressionSpec::parse(o.specs[i]));
    const std::string why = choice_obstacle(spec);
    require(why.empty(), "spec '{}' cannot be a choice: {}", o.specs[i], why);
  }
  return specs;
}

ChooseOptions read_limits(const gw_choose_options& o) {
  ChooseOptions options;
  require(std::isfinite(o.error) && o.error >= 0, "error is {}; it must be 0 or more", o.error);
  if (o.error > 0) options.error = o.error;
  require(o.bucket_bytes >= 0, "bucket_bytes is {}; it must not be negative", o.bucket_bytes);
  if (o.bucket_bytes > 0) options.bucket_bytes = o.bucket_bytes;
  options.seed = o.seed;
  require(std::isfinite(o.compute_ms) && 0 <= o.backward_ms && o.backward_ms <= o.compute_ms,
          "backward_ms is {} and compute_ms {}; backward is a part of a step's computation", o.backward_ms,
          o.compute_ms);
  options.compute_ms = o.compute_ms;
  options.backward_ms = o.backward_ms;
  return options;
}

void agree_on_choice(ApiComm& comm, const std::vector<CompressionSpec>& specs,
                     const std::vector<GradientTensor>& tensors, const ChooseOptions& options) {
  if (comm.communicator->world() == 1) return;
  const std::vector<std::string> statements = reducer_statements(
      comm, specs, tensors, options.bucket_bytes, options.seed, {fmt::format("error {}", options.error)});
  agree_on(comm.communicator->transport(), comm.stream, statements, "gw_choose");
}

}  // namespace
}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" gw_status gw_choose(gw_comm comm, const gw_tensor* tensors, int32_t n_tensors,
                               const gw_choose_options* options, void* stream, gw_trial* trials,
                               int32_t* chosen) {
  return guarded(__func__, [&] {
    LockedComm locked(comm);
    require(chosen != nullptr, "chosen is null");
    require(n_tensors > 0, "n_tensors is {}; pass the model's gradients", n_tensors);
    require(options != nullptr, "options is null; pass the specs to choose from");
    const auto given = read_struct<gw_choose_options>(options, "gw_choose_options");
    const std::vector<CompressionSpec> specs = read_specs(given);
    const ChooseOptions limits = read_limits(given);
    std::vector<void*> grads;
    const std::vector<GradientTensor> read = read_tensors(tensors, n_tensors, &grads);
    for (size_t i = 0; i < read.size(); ++i) {
      require(grads[i] != nullptr || read[i].count() == 0,
              "tensor {} ('{}') has no gradient: set gw_tensor.grad", i, read[i].name);
    }
    const Stream caller = locked->caller_stream(stream);
    agree_on_choice(*locked.comm, specs, read, limits);
    SpecChoice choice;
    locked->wait_or_notify([&] {
      choice = choose_spec(*locked->communicator, locked->stream, caller, specs, read, grads, limits);
    });
    require(choice.problem != SpecChoice::Problem::zero,
            "the mean of the gradients is zero, so no error can be measured; call gw_choose again in a later "
            "step");
    require(choice.problem == SpecChoice::Problem::none,
            "the mean of the gradients is not finite; call gw_choose again in a later step");
    for (size_t i = 0; trials != nullptr && i < specs.size(); ++i) {
      const SpecTrial& t = choice.trials[i];
      trials[i] = {.error = t.error, .communicate_ms = t.communicate_ms, .exposed_ms = t.exposed_ms};
    }
    *chosen = static_cast<int32_t>(choice.chosen);
  });
}
