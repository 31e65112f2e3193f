// Checks the caller's texts, which are sent to other ranks, saved or printed.
#pragma once

#include <string>

namespace gradwire::c_api {

// Throws BadInput, with a message that begins with `what`, unless the text is UTF-8 without control
// characters.
void check_text(const std::string& text, const std::string& what);
// Returns the text with '?' for each byte that check_text() rejects.
std::string printable(std::string text);

// Returns a caller's tag; "" if the tag is null. Throws BadInput for an invalid tag.
std::string checked_tag(const char* tag);
// Returns " 'TAG'" for error texts; "" without a tag. A long tag is shortened in the middle and gets a
// digest, so that different tags have different texts.
std::string shown(const std::string& tag);

}  // namespace gradwire::c_api
