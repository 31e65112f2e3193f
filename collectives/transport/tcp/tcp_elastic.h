// How a group of processes continues with survivors of a failure, and how it admits new ranks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/tcp/tcp_links.h"
#include "collectives/transport/transport.h"

namespace gradwire {

class TcpTransport;

class TcpElastic final : public ElasticGroup, public Admission {
 public:
  // Creates the capabilities of a group. `quorum`: the quorum of the previous group, which this group
  // continues; null for a first group. All arguments must outlive the object.
  TcpElastic(const TcpOptions& options, std::shared_ptr<Quorum> quorum, Membership& group,
             TcpFailure& failure)
      : options_(options), quorum_(std::move(quorum)), group_(group), failure_(failure) {}

  // Listens for other ranks at `address` if the group is shrinkable and does not continue a previous group's
  // quorum.
  void listen(const std::string& address);
  // Returns the contact of this rank's quorum; "" if the group is not shrinkable.
  std::string contact() const { return quorum_ ? quorum_->contact() : ""; }
  // Adds the contact of the next rank's quorum, in the order of the ranks. Throws CommError if only one of
  // the two ranks has a quorum.
  void add_contact(const std::string& contact);
  // Records the addresses at which the links have reached the other ranks.
  void reached_by(const TcpLinks& links);
  // Enters the group in this process's quorum.
  void enter();
  void leave();

  std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors) override;
  void open_admission(int most, std::function<std::string(const std::string&)> validate) override;
  void close_admission() override;
  int waiting_joiners() const override { return quorum_ ? quorum_->admission().waiting() : 0; }
  std::string invitation() const override;
  std::unique_ptr<Transport> grow() override;

 private:
  using Joiners = std::vector<AdmissionQueue::Joiner>;

  void require_quorum() const;
  Quorum::NextGroup begin_growth(const std::string& key, Joiners& joiners);
  std::unique_ptr<TcpTransport> form(Quorum::NextGroup& next, const Joiners& joiners, const std::string& key);
  TcpOptions grown_options(Quorum::NextGroup& next, const Joiners& joiners, const std::string& key);
  bool formed_everywhere(const std::string& key, bool here);

  const TcpOptions& options_;
  // Null if the group is not shrinkable, or once the next group has taken the quorum.
  std::shared_ptr<Quorum> quorum_;
  Membership& group_;
  TcpFailure& failure_;
  std::string address_;                // where this rank listens; empty: all addresses of this host
  std::vector<std::string> contacts_;  // the quorums' contacts by rank, until the group has formed
  bool entered_ = false;               // the quorum belongs to this group
  int growths_ = 0;
};

}  // namespace gradwire
