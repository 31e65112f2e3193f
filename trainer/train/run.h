// The training loop.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "trainer/config/config.h"
#include "trainer/log/observer.h"

namespace gradwire {

class Communicator;  // collectives/communicator/communicator.h
struct DataSplits;   // trainer/data/dataset.h
struct AutoPlan;     // trainer/train/plan_change.h

// Trains from fresh weights, a weight file (config.init) or a checkpoint (config.resume) on config.ranks()
// ranks. Returns after reporting the last evaluation. The same config gives the same bits, unless `plan`
// (--compression auto) lets the run choose again when its compression is no longer the best.
//
// Without `comm` each rank is a thread; throws the first failing rank's exception, after all other ranks have
// stopped. With `comm` this process is rank comm->rank() of ranks that are processes: collective. Every
// process must pass the same config, which is checked. Returns when all ranks are done, and throws on every
// rank when one rank fails. With config.elastic, `comm` must be shrinkable, and the current rank 0 calls its
// `observers`.
void run_training(const TrainConfig& config, const DataSplits& data, const RunObservers& observers,
                  Communicator* comm = nullptr, const AutoPlan* plan = nullptr);

// Joins a running job that was started with config.elastic. `config`: the job's settings, with as many ranks
// as at launch. `join_group` (join_tcp_transport()) sends `about`, the description of this process's
// settings and data, and blocks until the job admits the process. Returns and throws like run_training().
// Throws BadInput if the job rejects the process.
void join_training(const TrainConfig& config, const DataSplits& data, const RunObservers& observers,
                   const std::function<std::unique_ptr<Communicator>(const std::string& about)>& join_group);

}  // namespace gradwire
