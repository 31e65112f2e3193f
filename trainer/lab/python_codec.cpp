#include "trainer/lab/python_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "runtime/util/crc32.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/mix.h"
#include "trainer/lab/codec_worker.h"
#include "trainer/log/json.h"

namespace gradwire {
namespace {

using Reply = CodecWorker::Reply;

// A rank sends it before its message.
struct Header {
  enum class State : int64_t { gather, done, failed, not_finite };
  State state = State::failed;
  int64_t bytes = 0;
  int64_t checksum = 0;  // of a result
};

std::string_view bytes_of(const float* values, int64_t count) {
  return {reinterpret_cast<const char*>(values), static_cast<size_t>(count) * sizeof(float)};
}

class PythonCodec final : public Codec {
 public:
  PythonCodec(const BucketContext& c, uint64_t seed, double timeout_s)
      : transport_(*c.transport),
        spec_(c.spec.to_string()),
        name_(c.name),
        tensors_(c.tensors),
        gradients_(c.gradients),
        transfers_(c.transfers),
        begun_(Event::create(transport_.device())),
        ordered_(Event::create(transport_.device())),
        call_{mix(mix(0x7079, spec_), name_), fmt::format("the codec {} of {}", spec_, name_)},
        label_{call_.hash, call_.what},
        // Less than the transport's deadline, so that a codec that hangs is an error of its rank.
        worker_(c.spec.file, std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 500))) {
    Json tensors = Json::array();
    for (const BucketTensor& t : tensors_) {
      tensors.push_back(
          {{"name", t.name}, {"index", t.index}, {"begin", packed_}, {"rows", t.rows}, {"cols", t.cols}});
      packed_ += t.count();
    }
    const Json about{
        {"elements", packed_}, {"rank", transport_.rank()}, {"world", transport_.world()},  {"seed", seed},
        {"name", name_},       {"tensors", tensors},        {"arguments", c.spec.arguments}};
    const Reply reply = worker_.ask('i', {json_text(about)});
    if (reply.kind != Reply::Kind::ready)
      throw BadInput(
          fmt::format("--compression {}: rank {}, {}: {}", spec_, transport_.rank(), name_, reply.bytes));
  }

  size_t workspace_bytes() const override { return 0; }
  void bind(void*) override {}
  void rebind(float* gradients) override { gradients_ = gradients; }

  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    phases.enter(stream, Phase::compress);
    stream.submit([this] { encode(); });
    phases.enter(stream, Phase::communicate);
    exchange_on_transfers(stream, [this, step] { exchange(step); });
    phases.enter(stream, Phase::decompress);
    stream.submit([this] { decode(); });
    phases.enter(stream, Phase::communicate);
    exchange_on_transfers(stream, [this, step] { finish(step); });
    phases.enter(stream, Phase::decompress);
    stream.submit([this] { unpack(); });
  }

  int64_t state_bytes() const override { return packed_ * static_cast<int64_t>(sizeof(float)); }
  std::string describe() const override { return fmt::format("{}, in Python", spec_); }
  std::vector<PlannedAllreduce> plan() const override { return {}; }

 private:
  // Exchanges of all buckets run on one stream, in the same order on all ranks.
  template <typename Exchange>
  void exchange_on_transfers(const Stream& stream, Exchange exchange) {
    if (!transfers_) return stream.submit(exchange);
    begun_.record(stream);
    transfers_.wait(begun_);
    transfers_.submit(exchange);
    ordered_.record(transfers_);
    stream.wait(ordered_);
  }

  void encode() {
    values_.resize(static_cast<size_t>(packed_));
    float* to = values_.data();
    for (const BucketTensor& t : tensors_) to = std::copy_n(gradients_ + t.offset, t.count(), to);
    finite_ = std::all_of(values_.begin(), values_.end(), [](float x) { return std::isfinite(x); });
    lost_ = false;
    if (finite_) ask('s', {bytes_of(values_.data(), packed_)});
  }

  // Exchanges this rank's message, or its error, with all ranks.
  void exchange(int64_t step) {
    const Stream now = Stream::immediate_host();
    transport_.begin_call(now, call_);
    const std::vector<Header> headers = exchange_headers(now);
    const auto is = [](Header::State state) { return [state](const Header& h) { return h.state == state; }; };
    if (std::any_of(headers.begin(), headers.end(), is(Header::State::not_finite))) {
      if (finite_ && reply_.kind == Reply::Kind::gather) worker_.abandon();
      std::fill(values_.begin(), values_.end(), std::numeric_limits<float>::quiet_NaN());
      lost_ = true;
      return;
    }
    messages_ = exchange_messages(now, headers);
    for (size_t r = 0; r < headers.size(); ++r) {
      if (headers[r].state == Header::State::failed) fail(step, r, messages_[r]);
    }
    for (size_t r = 0; r < headers.size(); ++r) {
      if (headers[r].state != headers[0].state)
        fail(step, r, "this rank and rank 0 exchange different numbers of messages");
      if (headers[r].state == Header::State::done && headers[r].checksum != headers[0].checksum)
        fail(step, r,
             "its result differs from rank 0's; a mean may depend only on the messages and on state that is "
             "the same on all ranks");
    }
  }

  void decode() {
    if (lost_ || reply_.kind != Reply::Kind::gather) return;
    std::vector<int64_t> sizes;
    for (const std::string& message : messages_) sizes.push_back(static_cast<int64_t>(message.size()));
    std::vector<std::string_view> parts;
    for (size_t r = 0; r < sizes.size(); ++r) {
      parts.emplace_back(reinterpret_cast<const char*>(&sizes[r]), sizeof(int64_t));
      parts.emplace_back(messages_[r]);
    }
    ask('m', parts);
  }

  void ask(char letter, const std::vector<std::string_view>& parts) {
    reply_ = worker_.ask(letter, parts);
    if (reply_.kind == Reply::Kind::done && reply_.bytes.size() != bytes_of(values_.data(), packed_).size())
      reply_ = {Reply::Kind::failed, "its Python process sent a damaged answer"};
  }

  // Compares the results, after further messages if the codec sends any.
  void finish(int64_t step) {
    if (lost_) return;
    while (reply_.kind == Reply::Kind::gather) {
      exchange(step);
      decode();
    }
    exchange(step);
    std::memcpy(values_.data(), reply_.bytes.data(), reply_.bytes.size());
  }

  void unpack() {
    const float* from = values_.data();
    for (const BucketTensor& t : tensors_) {
      std::copy_n(from, t.count(), gradients_ + t.offset);
      from += t.count();
    }
  }

  std::vector<Header> exchange_headers(const Stream& now) {
    using State = Header::State;
    Header mine{.bytes = static_cast<int64_t>(reply_.bytes.size())};
    if (!finite_) {
      mine.state = State::not_finite;
    } else if (reply_.kind == Reply::Kind::gather) {
      mine.state = State::gather;
    } else if (reply_.kind == Reply::Kind::done) {
      mine.state = State::done;
      mine.checksum = crc32(reply_.bytes.data(), reply_.bytes.size());
      mine.bytes = 0;
    }
    std::vector<Header> all(static_cast<size_t>(transport_.world()));
    all[static_cast<size_t>(transport_.rank())] = mine;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < transport_.world(); ++peer) {
      if (peer == transport_.rank()) continue;
      transfers.push_back({Transfer::Kind::send, peer, &mine, sizeof mine});
      transfers.push_back({Transfer::Kind::receive, peer, &all[static_cast<size_t>(peer)], sizeof mine});
    }
    transport_.exchange(now, transfers, label_);
    return all;
  }

  std::vector<std::string> exchange_messages(const Stream& now, const std::vector<Header>& headers) {
    std::vector<std::string> all(headers.size());
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < transport_.world(); ++peer) {
      const auto at = static_cast<size_t>(peer);
      all[at].resize(static_cast<size_t>(headers[at].bytes));
      if (peer == transport_.rank()) {
        if (headers[at].bytes > 0) all[at] = reply_.bytes;
        continue;
      }
      const auto mine = static_cast<size_t>(headers[static_cast<size_t>(transport_.rank())].bytes);
      if (mine > 0) transfers.push_back({Transfer::Kind::send, peer, reply_.bytes.data(), mine});
      if (!all[at].empty())
        transfers.push_back({Transfer::Kind::receive, peer, all[at].data(), all[at].size()});
    }
    transport_.exchange(now, transfers, label_);
    return all;
  }

  [[noreturn]] void fail(int64_t step, size_t rank, const std::string& why) const {
    throw BadInput(fmt::format("--compression {}: rank {}, step {}, {}: {}", spec_, rank, step, name_, why));
  }

  Transport& transport_;
  const std::string spec_, name_;
  const std::vector<BucketTensor> tensors_;
  float* gradients_;
  Stream transfers_;
  Event begun_, ordered_;
  const Call call_;
  const ExchangeLabel label_;
  int64_t packed_ = 0;         // elements of all tensors
  std::vector<float> values_;  // the tensors' gradients, then their mean, without gaps
  bool finite_ = true;         // this rank's gradient is finite
  bool lost_ = false;          // a rank's gradient is not, so that the mean is NaN
  Reply reply_;
  std::vector<std::string> messages_;  // of all ranks
  CodecWorker worker_;
};

}  // namespace

std::unique_ptr<Codec> make_python_codec(const BucketContext& context, uint64_t seed, double timeout_s) {
  return std::make_unique<PythonCodec>(context, seed, timeout_s);
}

void check_python_codecs(const TrainConfig& config, const std::vector<CompressionSpec>& specs) {
  for (const CompressionSpec& spec : specs) {
    if (spec.method != CompressionSpec::Method::python) continue;
    open_regular_file(spec.file);
    const char* flag = config.devices.front().is_cuda()       ? "--device cuda"
                       : config.shard != Sharding::none       ? "--shard"
                       : config.graph                         ? "--graph"
                       : config.elastic                       ? "--elastic"
                       : !config.checkpoint_directory.empty() ? "--checkpoint"
                       : !config.resume.empty()               ? "--resume"
                                                              : nullptr;
    if (flag == nullptr) continue;
    throw BadInput(fmt::format(
        "--compression {}: a codec in Python runs on the host and keeps its state in its process; drop {}",
        spec.to_string(), flag));
  }
}

}  // namespace gradwire
