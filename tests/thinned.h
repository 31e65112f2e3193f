// What a test sweeps over: everything, or in a sanitizer build a few values spread over it, the first and the last among
// them. Sanitizers look at memory and order, which hardly depend on a format's arithmetic or a step's number, and take ten
// times as long. GRADWIRE_FULL_SWEEPS=1: everything in every build.
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

// Whether sweeps are short because this is a sanitizer build.
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
