#include "collectives/communicator.h"

#include "collectives/transport/gloo.h"
#include "collectives/transport/local.h"

namespace gradwire {

std::vector<std::unique_ptr<Communicator>> Communicator::create_local(const std::vector<Device>& devices,
                                                                      std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(devices, timeout)) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport)));
  }
  return communicators;
}

std::unique_ptr<Communicator> Communicator::create_gloo(const GlooOptions& options) {
  return std::make_unique<Communicator>(make_gloo_transport(options));
}

std::unique_ptr<Communicator> Communicator::create_single(Device device) {
  return std::move(create_local({device}, std::chrono::milliseconds(60'000)).front());
}

Communicator::Communicator(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}
Communicator::~Communicator() = default;

int Communicator::rank() const {
  return transport_->rank();
}
int Communicator::world() const {
  return transport_->world();
}
Device Communicator::device() const {
  return transport_->device();
}
uint64_t Communicator::bytes_sent() const {
  return transport_->bytes_sent();
}
void Communicator::abort(const std::string& reason) {
  transport_->abort(reason);
}
void Communicator::barrier() {
  transport_->barrier();
}
void Communicator::send_note(const std::string& note) {
  transport_->send_note(note);
}
std::string Communicator::take_note(int from) {
  return transport_->take_note(from);
}

}  // namespace gradwire
