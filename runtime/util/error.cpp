#include "runtime/util/error.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <utility>

namespace gradwire {
namespace {

char line[200];  // written at once, because several threads may write it

[[noreturn]] void terminate() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    static_cast<void>(!write(STDERR_FILENO, line, std::strlen(line)));
    _exit(1);
  } catch (...) {
  }
  __gnu_cxx::__verbose_terminate_handler();  // prints the exception, then aborts
  std::abort();
}

}  // namespace

void exit_cleanly_without_memory(const char* program) noexcept {
  snprintf(line, sizeof line,
           "%s: out of host memory; free memory, raise ulimit -v or the container's limit, or use less\n",
           program);
  std::set_terminate(terminate);
}

std::string suggestion(std::string_view wrong, const std::vector<std::string_view>& names) {
  // The least number of insertions, deletions and replacements that turn `wrong` into the name.
  const auto distance = [&](std::string_view name) {
    constexpr size_t kWord = 3;
    if (wrong.size() >= kWord && name.find(wrong) != name.npos) return size_t{1};
    std::vector<size_t> row(name.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 1; i <= wrong.size(); ++i) {
      size_t diagonal = std::exchange(row[0], i);
      for (size_t j = 1; j <= name.size(); ++j) {
        const size_t replaced =
            diagonal + (std::tolower(static_cast<unsigned char>(wrong[i - 1])) == name[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    return row.back();
  };
  const auto best = std::ranges::min_element(names, {}, distance);
  if (best == names.end() || distance(*best) > std::max<size_t>(2, wrong.size() / 2)) return {};
  return fmt::format("; did you mean '{}'?", *best);
}

}  // namespace gradwire
