// Texts of the caller's that are sent to other ranks, saved or printed.
#pragma once

#include <string>

namespace gradwire::c_api {

// Throws BadInput, which begins with `what`, unless the text is UTF-8 without control characters.
void check_text(const std::string& text, const std::string& what);
// The text with '?' for each byte that check_text() would refuse.
std::string printable(std::string text);

}  // namespace gradwire::c_api
