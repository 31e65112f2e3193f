// Returns a schedule as text: a line per round and transfer slot, a column per rank. Also draws trees as
// trees.
#pragma once

#include <string>

#include "collectives/schedule/schedule.h"

namespace gradwire::bench {

std::string draw(const Schedule& schedule);

}  // namespace gradwire::bench
