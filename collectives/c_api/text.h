// Checks the caller's texts, which are sent to other ranks, saved or printed.
#pragma once

#include <string>

namespace gradwire::c_api {

// Throws BadInput, with a message that begins with `what`, unless the text is UTF-8 without control
// characters.
void check_text(const std::string& text, const std::string& what);
// Returns the text with '?' for each byte that check_text() rejects.
std::string printable(std::string text);

}  // namespace gradwire::c_api
