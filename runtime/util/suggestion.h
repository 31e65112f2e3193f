// Suggests the name that a user may have meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

// Returns a text such as "; did you mean 'int4'?" if one of the names is similar to the wrong name; otherwise
// "".
std::string suggestion(std::string_view wrong, const std::vector<std::string_view>& names);

}  // namespace gradwire
