// The table of wire formats. Spec grammar, collectives, tests, benches and the docs' table follow from it.
#pragma once

#include <span>
#include <string_view>

#include "kernels/wire/format.h"

namespace gradwire {

// Those that other code names; any other is reached by its name alone.
extern const WireFormat kFp32Format, kBf16Format, kFp8Format;
inline constexpr Wire kFp32 = &kFp32Format, kBf16 = &kBf16Format, kFp8 = &kFp8Format;

// In the order of the docs; the first is kFp32.
std::span<const Wire> wire_formats();
// Null when there is none of that name.
Wire find_wire_format(std::string_view name);

}  // namespace gradwire
