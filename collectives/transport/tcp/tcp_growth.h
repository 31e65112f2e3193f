// The description of a growing group, sent by the old group's first rank to the other ranks and the joiners.
#pragma once

#include <string>
#include <vector>

#include "collectives/net/quorum.h"

namespace gradwire {

struct Growth {
  std::string name;                 // of the new group; empty: no joiners
  std::vector<std::string> joined;  // contacts of the new ranks, numbered after the old ones
  std::string location;             // address of the new group's store

  std::string encode() const;
  static Growth decode(const std::string& text);
};

// `world`: of the old group.
void send_admissions(const Growth& growth, const std::vector<Quorum::Joiner>& joiners, int world, int number);

}  // namespace gradwire
