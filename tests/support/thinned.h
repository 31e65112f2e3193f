// Selects the values of a sweep. A sanitizer build gets a few evenly spread values, including the first and
// the last value. Other builds get all values. Sanitizers check memory and ordering, which hardly depend on a
// format's arithmetic or a step's number, and sanitizer builds are ten times slower. GRADWIRE_FULL_SWEEPS=1
// selects all values in every build.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace gradwire::testing {

inline bool full_sweeps() {
  return std::getenv("GRADWIRE_FULL_SWEEPS") != nullptr;
}

// Returns whether sweeps are short because this is a sanitizer build.
inline bool short_sweeps() {
#ifdef GRADWIRE_SANITIZED
  return !full_sweeps();
#else
  return false;
#endif
}

template <typename Range>
auto thinned(const Range& all, size_t most = 3) {
  std::vector<typename std::iterator_traits<decltype(std::begin(all))>::value_type> some(std::begin(all),
                                                                                         std::end(all));
  if (short_sweeps() && some.size() > most) {
    for (size_t i = 1; i < most; ++i) some[i] = some[i * (some.size() - 1) / (most - 1)];
    some.resize(most);
  }
  return some;
}

template <typename T>
std::vector<T> thinned(std::initializer_list<T> all, size_t most = 3) {
  return thinned(std::vector<T>(all), most);
}

}  // namespace gradwire::testing
