// What the first rank of a group of processes tells the others, and those that join, of the group they form together.
#pragma once

#include <string>
#include <vector>

#include "collectives/rendezvous/reunion.h"

namespace gradwire {

struct Growth {
  std::string name;                 // of the new group; empty: nobody joins
  std::vector<std::string> joined;  // contacts of the new ranks, which follow the old ones
  std::string meeting;              // where the new group's store is

  std::string encode() const;
  static Growth decode(const std::string& text);
};

// `world`: of the group before.
void send_invitations(const Growth& growth, const std::vector<Reunion::Newcomer>& newcomers, int world,
                      int number);

}  // namespace gradwire
