// What a test sweeps over: everything, or in a sanitizer build a few values spread over it, the first and the last among
// them. Sanitizers look at memory and order, which hardly depend on a format's arithmetic or a step's number, and take ten
// times as long.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace gradwire::testing {

template <typename Range>
auto thinned(const Range& all, [[maybe_unused]] size_t most = 3) {
  std::vector<typename std::iterator_traits<decltype(std::begin(all))>::value_type> some(std::begin(all),
                                                                                         std::end(all));
#ifdef GRADWIRE_SANITIZED
  if (some.size() > most) {
    for (size_t i = 1; i < most; ++i) some[i] = some[i * (some.size() - 1) / (most - 1)];
    some.resize(most);
  }
#endif
  return some;
}

template <typename T>
std::vector<T> thinned(std::initializer_list<T> all, size_t most = 3) {
  return thinned(std::vector<T>(all), most);
}

}  // namespace gradwire::testing
