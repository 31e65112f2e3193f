// The transport between processes. Internal: see tcp.h.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/tcp/tcp_elastic.h"
#include "collectives/transport/tcp/tcp_exchanges.h"
#include "collectives/transport/transport.h"

namespace gradwire {

class TcpTransport final : public Transport, public EarlyExchange, public MessagesToRankZero {
 public:
  // Joins the group. `quorum`: the quorum of the previous group, if this group continues that quorum.
  // `enters`: the quorum belongs to this group at once; otherwise the quorum belongs to this group from
  // enter_quorum() on.
  explicit TcpTransport(const TcpOptions& options, std::shared_ptr<Quorum> quorum = nullptr,
                        bool enters = true);
  ~TcpTransport() override;

  // Sets the join timeout of the groups that follow this one.
  void set_joining(std::chrono::milliseconds joining) { options_.group.joining = joining; }
  void enter_quorum() { elastic_.enter(); }

  void begin_call(const Stream& stream, const Call& call) override;
  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override;
  void barrier() override;
  void abort(const std::string& reason) override { failure_.abort(reason); }
  void check() override { failure_.throw_if_failed(); }
  std::unique_ptr<Transport> split(const std::vector<int>& members) override;

  EarlyExchange* early_exchange() override { return this; }
  MessagesToRankZero* messages() override { return this; }
  ElasticGroup* elastic() override { return &elastic_; }
  Admission* admission() override { return &elastic_; }

  void begin_exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                      const ExchangeLabel& label) override;
  void end_exchange(const Stream& stream) override;
  void send_message(const std::string& message) override;
  std::string take_message(int from) override;

 private:
  void connect(SteadyClock::time_point deadline);
  std::vector<std::string> exchange_contacts(const TcpLinks& links, SteadyClock::time_point deadline);

  TcpOptions options_;
  std::string address_;  // where this rank listens; empty: all addresses of this host
  int splits_ = 0;
  // Members are destroyed in reverse order: first the group, whose thread may record a failure and interrupt
  // the links.
  TcpFailure failure_{group_};
  TcpExchanges exchanges_;
  TcpElastic elastic_;
  Membership group_;
};

}  // namespace gradwire
