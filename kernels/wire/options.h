// The options of a wire format in its specs, `int4:block=64`; each format describes its options.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

// A member of a format that a spec may set. Its value is an index into `words` or, without words, a number
// from `least` to `most`.
struct FormatOption {
  const char* key;
  int* value;
  std::vector<const char*> words = {};
  int least = 0, most = 0;
  bool power_of_two = false;

  // Sets the member from `text`. Returns false when `text` is not a legal value.
  bool set(std::string_view text) const;
  std::string text() const;   // returns the text of the current value
  std::string legal() const;  // returns "pow2|fp32" or "a power of two from 32 to 512"
};

inline FormatOption block_option(int* value, int least = 32, int most = 512) {
  return {.key = "block", .value = value, .least = least, .most = most, .power_of_two = true};
}

}  // namespace gradwire
