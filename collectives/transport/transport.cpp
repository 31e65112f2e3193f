#include "collectives/transport/transport.h"

#include <fmt/format.h>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr const char* kRemedy = "start one process per rank (torchrun, srun or mpirun)";

}  // namespace

Buffer Transport::exchange_memory(size_t bytes) {
  return Buffer(device(), bytes);
}

std::unique_ptr<Transport> Transport::split(const std::vector<int>&) {
  throw BadInput(fmt::format("the {} transport cannot be split", name()));
}

std::string Transport::native_allreduce_obstacle() {
  if (native_allreduce() != nullptr) return "";
  return fmt::format(
      "over the {} transport there is no NCCL; start a process for each GPU (torchrun, srun or mpirun), or "
      "use schedule=auto",
      name());
}

MessagesToRankZero& require_messages(Transport& transport) {
  if (MessagesToRankZero* found = transport.messages()) return *found;
  throw Error(fmt::format("the {} transport carries no messages; {}", transport.name(), kRemedy));
}

ElasticGroup& require_elastic(Transport& transport) {
  if (ElasticGroup* found = transport.elastic()) return *found;
  throw BadInput(
      fmt::format("the {} transport cannot continue when ranks die; {}", transport.name(), kRemedy));
}

Admission& require_admission(Transport& transport) {
  if (Admission* found = transport.admission()) return *found;
  throw BadInput(fmt::format("no new ranks can join over the {} transport; {}", transport.name(),
                             "use processes on the host (transport tcp)"));
}

}  // namespace gradwire
