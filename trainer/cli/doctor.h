// `gradwire doctor`: what this machine and this build offer, and what is off and why.
#pragma once

#include <string>

namespace gradwire {

std::string doctor_report();

}  // namespace gradwire
