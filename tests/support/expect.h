// Assertions about texts and errors. A failure is reported at the caller's line.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace gradwire::testing {

// Expects `text` to contain each of `parts`.
inline void expect_has(const std::string& text, const std::vector<std::string>& parts,
                       std::source_location at = std::source_location::current()) {
  for (const std::string& part : parts) {
    if (text.find(part) != std::string::npos) continue;
    ADD_FAILURE_AT(at.file_name(), static_cast<int>(at.line())) << "'" << part << "' is not in: " << text;
  }
}

// Expects `action` to throw an E whose text contains each of `parts`. Returns the text.
template <typename E, typename Action>
std::string expect_error(Action&& action, const std::vector<std::string>& parts,
                         std::source_location at = std::source_location::current()) {
  try {
    std::forward<Action>(action)();
  } catch (const E& error) {
    expect_has(error.what(), parts, at);
    return error.what();
  }
  ADD_FAILURE_AT(at.file_name(), static_cast<int>(at.line())) << "no error was thrown";
  return "";
}

// Returns the text of the exception that `action` throws, or "no error".
template <typename Action>
std::string error_of(Action&& action) {
  try {
    std::forward<Action>(action)();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace gradwire::testing
