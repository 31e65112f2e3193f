// One rank of a group without other ranks, for building reducers and codecs to measure their memory. Every
// exchange is an error.
#pragma once

#include <string>
#include <vector>

#include "collectives/transport/transport.h"
#include "runtime/util/error.h"

namespace gradwire {

class PlannedTransport : public Transport, public NativeAllreduce {
 public:
  PlannedTransport(int rank, int world, Device device) : Transport("planned", {rank, world, device}) {}

  void begin_call(const Stream&, const Call&) override {}
  void exchange(const Stream&, const std::vector<Transfer>&, const ExchangeLabel& label) override {
    refuse(label.what);
  }
  NativeAllreduce* native_allreduce() override { return this; }
  void allreduce(const Stream&, const float*, float*, int64_t, bool, uint64_t,
                 const std::string& what) override {
    refuse(what);
  }
  void barrier() override { refuse("barrier"); }
  void abort(const std::string&) override {}
  void check() override {}

 private:
  [[noreturn]] static void refuse(const std::string& what) {
    throw Error(what + ": a planned group has no other ranks and moves no data");
  }
};

}  // namespace gradwire
