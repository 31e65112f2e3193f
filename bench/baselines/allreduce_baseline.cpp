#include "bench/cases/collective_case.h"

#ifdef GRADWIRE_HAS_GLOO
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#endif

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include "collectives/agreement/statements.h"
#if defined(GRADWIRE_HAS_NCCL) && defined(GRADWIRE_HAS_CUDA)
#include "collectives/transport/nccl/nccl_api.h"
#endif
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

// Returns the mean microseconds of run(1), after run(warmup) on all ranks.
template <typename Run>
[[maybe_unused]] double mean_us(Communicator& comm, int warmup, int iterations, const Run& run) {
  using Clock = std::chrono::steady_clock;
  run(warmup);
  comm.barrier();
  const auto start = Clock::now();
  run(iterations);
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / iterations;
}

#ifdef GRADWIRE_HAS_GLOO

// Returns this machine's local address on the route to the rendezvous.
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
      if (!values_.contains(key)) throw Error("gloo waits for the key {}, which no rank has set", key);
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

#endif

}  // namespace

#ifdef GRADWIRE_HAS_GLOO
AllreduceBaseline make_gloo_baseline(Communicator& comm, const Stream& stream, const std::string& rendezvous,
                                     double timeout_s) {
  namespace tcp = ::gloo::transport::tcp;
  const auto context = std::make_shared<::gloo::rendezvous::Context>(comm.rank(), comm.world());
  context->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
  std::shared_ptr<::gloo::transport::Device> device =
      tcp::CreateDevice(tcp::attr(address_towards(rendezvous).c_str()));
  GatheringStore store(comm, stream);
  context->connectFullMesh(store, device);
  return [&comm, device, context](int64_t count, int warmup, int iterations) {
    std::vector<float> data(static_cast<size_t>(count));
    ::gloo::AllreduceOptions options(context);
    options.setOutput(data.data(), data.size());
    void (*sum)(void*, const void*, const void*, size_t) = ::gloo::sum<float>;
    options.setReduceFunction(sum);
    return mean_us(comm, warmup, iterations, [&](int times) {
      for (int i = 0; i < times; ++i) ::gloo::allreduce(options);
    });
  };
}
#else
AllreduceBaseline make_gloo_baseline(Communicator&, const Stream&, const std::string&, double) {
  return {};
}
#endif

#if defined(GRADWIRE_HAS_NCCL) && defined(GRADWIRE_HAS_CUDA)
AllreduceBaseline make_nccl_baseline(Communicator& comm, const Stream& stream) {
  const NcclApi& nccl = NcclApi::loaded();
  if (nccl.all_reduce == nullptr) return {};
  auto check = [&nccl](ncclResult_t result, const char* call) {
    if (result != ncclSuccess) throw Error("{}: {}", call, nccl.text(result, nullptr));
  };
  ncclUniqueId id{};
  if (comm.rank() == 0) check(nccl.get_unique_id(&id), "ncclGetUniqueId");
  id = all_gather_value(comm.transport(), stream, id, "the baseline's unique id")[0];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t created = nullptr;
  check(nccl.init_rank(&created, comm.world(), id, comm.rank(), &config), "ncclCommInitRankConfig");
  const std::shared_ptr<std::remove_pointer_t<ncclComm_t>> group(created,
                                                                 [&nccl](ncclComm_t c) { nccl.destroy(c); });
  return [&comm, &nccl, stream, check, group](int64_t count, int warmup, int iterations) {
    Buffer data = make_buffer<float>(stream.device(), count);
    fill_zero(stream, data.data(), data.bytes());
    return mean_us(comm, warmup, iterations, [&](int times) {
      for (int i = 0; i < times; ++i) {
        check(nccl.all_reduce(data.data(), data.data(), static_cast<size_t>(count), ncclFloat32, ncclSum,
                              group.get(), reinterpret_cast<cudaStream_t>(stream.native())),
              "ncclAllReduce");
      }
      stream.synchronize();
    });
  };
}
#else
AllreduceBaseline make_nccl_baseline(Communicator&, const Stream&) {
  return {};
}
#endif

}  // namespace gradwire::bench
