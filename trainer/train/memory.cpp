#include "trainer/train/memory.h"

#include <fmt/format.h>

#include <memory>

#include "collectives/communicator/communicator.h"
#include "collectives/transport/planned.h"
#include "trainer/log/console.h"
#include "trainer/model/vit.h"
#include "trainer/train/layout.h"

namespace gradwire {

RunMemory plan_memory(const TrainConfig& config) {
  Communicator comm(std::make_unique<PlannedTransport>(0, config.ranks(), Device::host()));
  comm.set_link_costs({});  // no peers to measure
  const Stream stream = Stream::immediate_host();
  const Reducer reducer(comm, config.compression, gradient_tensors(config.model),
                        {.bucket_bytes = config.bucket_bytes(),
                         .seed = config.seed,
                         .alignment = tensor_alignment(config.precision)});
  const Vit model(config.model, stream, reducer_layout(reducer),
                  {.max_batch = config.batch_size, .precision = config.precision});
  const int64_t moments = config.optimizer == OptimizerKind::adamw ? 2 : config.momentum != 0 ? 1 : 0;
  return {.model = model.bytes(),
          .gradients = static_cast<int64_t>(reducer.gradients().bytes()) *
                       (config.gradient_views || config.ranks() == 1 ? 1 : 2),
          .optimizer = moments * reducer.elements() * static_cast<int64_t>(sizeof(float)),
          .compression = reducer.memory()};
}

std::string memory_text(const TrainConfig& config, const RunMemory& memory) {
  auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const ReducerMemory& extra = memory.compression;
  return fmt::format(
      "Memory per rank: {} model and activations, {} gradients, {} optimizer\n"
      "Extra memory for {}: {} ({} residual, {} factors, {} staging)",
      text(memory.model), text(memory.gradients), text(memory.optimizer), config.compression.to_string(),
      text(extra.total()), text(extra.residual), text(extra.factors), text(extra.staging));
}

}  // namespace gradwire
