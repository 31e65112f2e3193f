// The table of wire formats. The spec grammar, collectives, tests, benches and the docs' table follow from
// it.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/wire/format.h"

namespace gradwire {

// The formats that other code names; all others are found by name only.
extern const Wire kFp32, kBf16, kFp8;

// In the order of the docs; the first is kFp32. Registered formats (registered.h) come last. The span stays
// valid, and lacks formats registered after the call.
std::span<const Wire> wire_formats();
// Returns null when no format has this name.
Wire find_wire_format(std::string_view name);
// Adds `format` to the table. Returns the existing format of this name if there is one.
Wire add_wire_format(std::unique_ptr<const WireFormat> format);
// Returns the format with the options of `variant`, a copy of a table entry. Calls settle(). Equal options
// give the same object.
Wire intern_wire_format(WireFormat& variant);
// `spec` is "name" or "name:key=value,..." and must be legal: for code and tests without user input.
Wire wire_format(std::string_view spec);

// Returns the table, and its entries with options whose code differs. For tests and benches.
std::vector<Wire> example_wire_formats();

}  // namespace gradwire
