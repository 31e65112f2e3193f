#include "collectives/program/executor.h"

namespace gradwire {

ProgramExecutor::ProgramExecutor(const ProgramPlan& plan)
    : plan_(plan),
      info_{.part = plan.options.part,
            .schedule = name(plan.schedule.kind),
            .slices = plan.slices,
            .execution = plan.execution} {
  if (!plan.overlapped) return;
  begun_ = Event::create(plan.transport.device());
  ordered_ = Event::create(plan.transport.device());
}

void ProgramExecutor::run(const Stream& stream, BucketPhases* phases) {
  const Stream& transfers = plan_.overlapped ? plan_.options.transfers : stream;
  if (plan_.overlapped) {
    begun_.record(stream);
    transfers.wait(begun_);
  }
  plan_.transport.begin_call(transfers, plan_.call);
  enqueue(stream, transfers, phases);
}

void ProgramExecutor::enter(BucketPhases* phases, const Stream& stream, Phase phase) const {
  if (phases != nullptr) phases->enter(stream, phase, phase == Phase::communicate ? &info_ : nullptr);
}

void ProgramExecutor::order(const Stream& earlier, const Stream& later) {
  if (!plan_.overlapped) return;
  ordered_.record(earlier);
  later.wait(ordered_);
}

void SerialExecutor::enqueue(const Stream& stream, const Stream& transfers, BucketPhases* phases) {
  enter(phases, stream, Phase::communicate);
  enqueue_on(transfers);
  order(transfers, stream);
}

}  // namespace gradwire
