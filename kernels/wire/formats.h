// The table of wire formats. The spec grammar, collectives, tests, benches and the docs' table are derived
// from the table.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/wire/format.h"

namespace gradwire {

// The formats that other code names; all others are found by name only.
extern const Wire kFp32, kBf16, kFp8;

// Returns the formats in the order of the docs; the first format is kFp32. Registered formats (registered.h)
// come last. The span remains valid, but lacks formats registered after the call.
std::span<const Wire> wire_formats();
// Returns the format with this name; null if there is none.
Wire find_wire_format(std::string_view name);
// Adds `format` to the table. If a format of this name exists, returns the existing format.
Wire add_wire_format(std::unique_ptr<const WireFormat> format);
// Returns the format with the options of `variant`, a copy of a table entry. Calls settle(). Equal options
// give the same object.
Wire intern_wire_format(WireFormat& variant);
// Returns the format of a spec. `spec` is "name" or "name:key=value,..." and must be legal: for code and
// tests without user input.
Wire wire_format(std::string_view spec);

// Returns all formats of the table, plus variants with options whose code differs, for tests and benches.
std::vector<Wire> example_wire_formats();

}  // namespace gradwire
