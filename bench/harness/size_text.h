// Sizes in the format of the benchmarks' tables.
#pragma once

#include <cstdint>
#include <string>

namespace gradwire::bench {

// Returns a size as text, in powers of 1024: "4K", "1.5M", "1G".
std::string size_text(int64_t bytes);

}  // namespace gradwire::bench
