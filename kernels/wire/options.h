// The options of a wire format in its specs, `int4:block=64`, by which each format describes itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

// A member of a format that a spec may set: to one of `words`, by its place, or, where there are none, to a
// number from `least` to `most`.
struct FormatOption {
  const char* key;
  int* value;
  std::vector<const char*> words = {};
  int least = 0, most = 0;
  bool power_of_two = false;

  // False when `text` is not a legal value.
  bool set(std::string_view text) const;
  std::string text() const;   // of the present value
  std::string legal() const;  // "pow2|fp32", "a power of two from 32 to 512"
};

inline FormatOption block_option(int* value, int least = 32, int most = 512) {
  return {.key = "block", .value = value, .least = least, .most = most, .power_of_two = true};
}

}  // namespace gradwire
