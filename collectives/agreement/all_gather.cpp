#include "collectives/agreement/all_gather.h"

#include "runtime/device/unwinding.h"
#include "runtime/util/mix.h"

namespace gradwire {

std::vector<std::string> all_gather_bytes(Transport& transport, const Stream& stream, std::string_view mine,
                                          const std::string& what) {
  const int world = transport.world(), rank = transport.rank();
  const size_t bytes = mine.size();
  const auto count = static_cast<int64_t>(bytes);
  Buffer all = make_buffer<char>(transport.device(), count * world);
  const auto part = [&](int of) { return all.as<char>() + of * count; };
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world && bytes > 0; ++peer) {
    if (peer == rank) continue;
    transfers.push_back({Transfer::Kind::send, peer, part(rank), bytes});
    transfers.push_back({Transfer::Kind::receive, peer, part(peer), bytes});
  }
  const ExchangeLabel label{mix(mix(0x616c6c, static_cast<uint64_t>(count)), what), what};
  const Call call{label.tag, what};
  const FinishOnError finish(stream);
  copy(stream, part(rank), mine.data(), bytes);
  transport.begin_call(stream, call);
  transport.exchange(stream, transfers, label);
  const std::vector<char> flat = to_host(stream, all.as<const char>(), count * world);
  transport.check();
  std::vector<std::string> result;
  for (int r = 0; r < world; ++r)
    result.emplace_back(flat.begin() + r * count, flat.begin() + (r + 1) * count);
  return result;
}

}  // namespace gradwire
