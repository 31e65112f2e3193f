// Work of the first step after a load: checks of the states, and sending residuals loaded in a world of 1.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "collectives/agreement/statements.h"
#include "collectives/c_api/reducer.h"
#include "kernels/wire/floats.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {

void ApiReducer::announce_loaded_state() {
  if (!loaded_.unannounced) return;
  loaded_.unannounced = false;
  if (comm->communicator->world() == 1) return;
  comm->communicator->transport().begin_call(comm->stream, loaded_.call);
  refuse_residuals_loaded_twice();
}

// Fails the group if two ranks have loaded the residual of the same rank. Collective; blocks the caller.
void ApiReducer::refuse_residuals_loaded_twice() const {
  Transport& transport = comm->communicator->transport();
  const std::string what = "comparing the states that ranks have loaded";
  size_t most = 0;
  for (const auto& count :
       all_gather(transport, comm->stream, {static_cast<double>(loaded_.residuals.size())}, what)) {
    most = std::max(most, static_cast<size_t>(count[0]));
  }
  constexpr size_t kNumbers = 3;  // world (0: no residual), rank, digest
  std::vector<double> numbers;
  for (const LoadedResidual& r : loaded_.residuals) {
    numbers.insert(numbers.end(), {static_cast<double>(r.world), static_cast<double>(r.rank),
                                   static_cast<double>(r.digest >> 11)});
  }
  numbers.resize(most * kNumbers);
  const auto all = all_gather(transport, comm->stream, numbers, what);
  std::map<std::tuple<double, double, double>, size_t> loaded_by;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t at = 0; at < all[rank].size(); at += kNumbers) {
      const double* r = all[rank].data() + at;
      if (r[0] == 0) continue;
      const auto [other, added] = loaded_by.emplace(std::tuple(r[0], r[1], r[2]), rank);
      if (added) continue;
      const std::string text = fmt::format(
          "{}: ranks {} and {} have both loaded the residual that rank {} of {} saved, which would be sent "
          "twice; load each state on one rank, and on a new rank with gw_reducer_state_load_ranks()",
          options.name, other->second, rank, r[1], r[0]);
      transport.abort(text);
      throw CommError(fmt::format("rank {}: {}", transport.rank(), text));
    }
  }
}

void ApiReducer::add_unsent(int32_t tensor, const Stream& stream) {
  const auto unsent = unsent_.find(static_cast<size_t>(tensor));
  if (unsent == unsent_.end()) return;
  const GradientTensor& t = tensors[unsent->first];
  void* const gradient = reducer.gradient(tensor);
  const int64_t count = t.count();
  std::vector<std::byte> bytes(static_cast<size_t>(count * bytes_of(t.dtype)));
  copy(stream, bytes.data(), gradient, bytes.size());
  stream.synchronize();
  const Stream host = Stream::immediate_host();
  std::vector<float> values(static_cast<size_t>(count));
  if (t.dtype == DType::f32) {
    copy(host, values.data(), bytes.data(), bytes.size());
  } else {
    widen(host, t.dtype, bytes.data(), values.data(), count);
  }
  for (size_t i = 0; i < values.size(); ++i) values[i] += unsent->second[i];
  if (t.dtype == DType::f32) {
    copy(host, bytes.data(), values.data(), bytes.size());
  } else {
    narrow(host, t.dtype, values.data(), bytes.data(), count);
  }
  copy(stream, gradient, bytes.data(), bytes.size());
  stream.synchronize();
  unsent_.erase(unsent);
}

}  // namespace gradwire::c_api
