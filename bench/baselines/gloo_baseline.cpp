#include "bench/baselines/allreduce_baseline.h"

#ifdef GRADWIRE_HAS_GLOO
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#endif

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "collectives/agreement/statements.h"
#include "runtime/util/error.h"

namespace gradwire::bench {

std::string address_towards(const std::string& rendezvous) {
  const std::string loopback = "127.0.0.1";
  if (!rendezvous.starts_with("tcp://")) return loopback;
  size_t colon = rendezvous.rfind(':');
  std::string host = rendezvous.substr(6, colon - 6), port = rendezvous.substr(colon + 1);
  if (host.starts_with("[")) host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return loopback;
  // Connecting a UDP socket sends no data. The call only looks up the route.
  std::string address = loopback;
  int fd = socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  char text[NI_MAXHOST];
  if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
      getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0,
                  NI_NUMERICHOST) == 0) {
    address = text;
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return address;
}

#ifdef GRADWIRE_HAS_GLOO
namespace {

// A key-value store for Gloo. Each rank sets one key and reads the keys of all other ranks, so all-gathers
// over the communicator suffice.
class GatheringStore final : public ::gloo::rendezvous::Store {
 public:
  GatheringStore(Communicator& comm, const Stream& stream) : comm_(comm), stream_(stream) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    auto keys = gather({key.begin(), key.end()}), values = gather(data);
    for (size_t r = 0; r < keys.size(); ++r) values_[{keys[r].begin(), keys[r].end()}] = values[r];
  }
  std::vector<char> get(const std::string& key) override { return values_.at(key); }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      if (!values_.contains(key))
        throw Error(fmt::format("gloo waits for the key {}, which no rank has set", key));
    }
  }

 private:
  std::vector<std::vector<char>> gather(const std::vector<char>& bytes) {
    const std::string what = "addresses of the baseline's ranks";
    const std::vector<size_t> lengths = all_gather_value(comm_.transport(), stream_, bytes.size(), what);
    std::vector<char> padded = bytes;
    padded.resize(*std::max_element(lengths.begin(), lengths.end()));
    auto all = all_gather(comm_.transport(), stream_, padded, what);
    for (size_t r = 0; r < all.size(); ++r) all[r].resize(lengths[r]);
    return all;
  }

  Communicator& comm_;
  Stream stream_;
  std::map<std::string, std::vector<char>> values_;
};

class GlooBaseline final : public AllreduceBaseline {
 public:
  GlooBaseline(Communicator& comm, const Stream& stream, const std::string& address, double timeout_s)
      : comm_(comm),
        device_(::gloo::transport::tcp::CreateDevice(::gloo::transport::tcp::attr(address.c_str()))),
        context_(std::make_shared<::gloo::rendezvous::Context>(comm.rank(), comm.world())) {
    context_->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
    GatheringStore store(comm, stream);
    context_->connectFullMesh(store, device_);
  }

  double time_us(int64_t count, int warmup, int iterations) override {
    std::vector<float> data(static_cast<size_t>(count));
    ::gloo::AllreduceOptions options(context_);
    options.setOutput(data.data(), data.size());
    void (*sum)(void*, const void*, const void*, size_t) = ::gloo::sum<float>;
    options.setReduceFunction(sum);
    for (int i = 0; i < warmup; ++i) ::gloo::allreduce(options);
    comm_.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < iterations; ++i) ::gloo::allreduce(options);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
           iterations;
  }

 private:
  Communicator& comm_;
  std::shared_ptr<::gloo::transport::Device> device_;
  const std::shared_ptr<::gloo::rendezvous::Context> context_;
};

}  // namespace

std::unique_ptr<AllreduceBaseline> make_gloo_baseline(Communicator& comm, const Stream& stream,
                                                      const std::string& address, double timeout_s) {
  return std::make_unique<GlooBaseline>(comm, stream, address, timeout_s);
}

#else

std::unique_ptr<AllreduceBaseline> make_gloo_baseline(Communicator&, const Stream&, const std::string&,
                                                      double) {
  return nullptr;
}

#endif

}  // namespace gradwire::bench
