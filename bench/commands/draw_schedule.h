// Returns a schedule as text: a line per round and transfer slot, a column per rank. Draws trees as well.
#pragma once

#include <string>

#include "collectives/schedule/schedule.h"

namespace gradwire::bench {

std::string draw(const Schedule& schedule);

}  // namespace gradwire::bench
