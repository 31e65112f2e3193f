// One rank of a group without other ranks, for building reducers and codecs to measure their memory. Any
// exchange is an error.
#pragma once

#include "collectives/transport/transport.h"
#include "runtime/util/error.h"

namespace gradwire {

class PlannedTransport : public Transport {
 public:
  PlannedTransport(int rank, int world, Device device) : rank_(rank), world_(world), device_(device) {}

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  Device device() const override { return device_; }
  const char* name() const override { return "planned"; }
  void begin(const Stream&, const Call&) override {}
  void exchange(const Stream&, const std::vector<Transfer>&, const ExchangeLabel& label) override {
    throw Error("a planned group moves nothing: " + label.what);
  }
  std::string library_obstacle() const override { return ""; }
  void barrier() override { throw Error("a planned group has no other ranks to meet"); }
  void abort(const std::string&) override {}
  void check() override {}

 private:
  int rank_, world_;
  Device device_;
};

}  // namespace gradwire
