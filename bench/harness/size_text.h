// Sizes in the format of the benchmarks' tables.
#pragma once

#include <cstdint>
#include <string>

namespace gradwire::bench {

// Returns "4K", "1.5M", "1G": powers of 1024.
std::string size_text(int64_t bytes);

}  // namespace gradwire::bench
