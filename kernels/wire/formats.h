// The table of wire formats. Spec grammar, collectives, tests, benches and the docs' table follow from it.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/wire/format.h"

namespace gradwire {

// Those that other code names; any other is reached by its name alone.
extern const Wire kFp32, kBf16, kFp8;

// In the order of the docs; the first is kFp32. Registered formats (registered.h) come last; those registered
// later are not in the span, which stays valid.
std::span<const Wire> wire_formats();
// Null when there is none of that name.
Wire find_wire_format(std::string_view name);
// Adds `format` to the table, unless there is one of its name, which is then returned.
Wire add_wire_format(std::unique_ptr<const WireFormat> format);
// The format that is like `variant`, a copy of an entry whose options were set; settled, and the same one for
// the same options.
Wire intern_wire_format(WireFormat& variant);
// "name" or "name:key=value,...", legal, for code and tests that have no user to answer.
Wire wire_format(std::string_view spec);

// For tests and benches: the table, and its entries with options whose code differs.
std::vector<Wire> example_wire_formats();

}  // namespace gradwire
