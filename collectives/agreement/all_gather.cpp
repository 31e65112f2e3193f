#include "collectives/agreement/all_gather.h"

#include "runtime/device/unwinding.h"
#include "runtime/util/mix.h"

namespace gradwire {

std::vector<std::vector<double>> all_gather(Transport& transport, const Stream& stream,
                                            const std::vector<double>& mine, const std::string& what) {
  const int world = transport.world(), rank = transport.rank();
  const auto count = static_cast<int64_t>(mine.size());
  Buffer all = make_buffer<double>(transport.device(), count * world);
  double* own = all.as<double>() + rank * count;
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world && count > 0; ++peer) {
    if (peer == rank) continue;
    transfers.push_back({Transfer::Kind::send, peer, own, mine.size() * sizeof(double)});
    transfers.push_back(
        {Transfer::Kind::receive, peer, all.as<double>() + peer * count, mine.size() * sizeof(double)});
  }
  const ExchangeLabel label{mix(mix(0x616c6c, static_cast<uint64_t>(count)), what), what};
  const Call call{label.tag, what};
  const FinishOnError finish(stream);
  copy(stream, own, mine.data(), mine.size() * sizeof(double));
  transport.begin_call(stream, call);
  transport.exchange(stream, transfers, label);
  const std::vector<double> flat = to_host(stream, all.as<const double>(), count * world);
  transport.check();
  std::vector<std::vector<double>> result;
  for (int r = 0; r < world; ++r)
    result.emplace_back(flat.begin() + r * count, flat.begin() + (r + 1) * count);
  return result;
}

}  // namespace gradwire
