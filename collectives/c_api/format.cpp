// gw_format_register(): wire formats of the calling program.
#include <gradwire/gradwire.h>
#include "collectives/c_api/errors.h"
#include "collectives/c_api/structs.h"
#include "collectives/spec/spec.h"
#include "kernels/wire/registered.h"

extern "C" gw_status gw_format_register(const gw_format* format) {
  using namespace gradwire;
  using c_api::require;
  return c_api::guarded(__func__, [&] {
    require(format != nullptr, "format is null");
    const auto f = c_api::read_struct<gw_format>(format, "gw_format");
    require(f.name != nullptr, "gw_format.name is null");
    const std::string name = f.name;
    require(!CompressionSpec::is_codec(name),
            "wire format '{0}': specs know a codec as {0}; choose another name", name);
    require(f.encode != nullptr, "wire format '{}': encode is null", name);
    require(f.decode != nullptr, "wire format '{}': decode is null", name);
    register_wire_format(name, f.block, f.bytes, {.encode = f.encode, .decode = f.decode, .user = f.user});
  });
}
