// Converts between gw_dtype and DType.
#pragma once

#include <gradwire/gradwire.h>
#include "collectives/c_api/errors.h"
#include "runtime/device/dtype.h"

namespace gradwire::c_api {

// Returns the DType of a gw_dtype. Throws BadInput for an invalid type. `whose` begins the error text: "" or
// "tensor 3 ('bias'): ".
inline DType checked_dtype(gw_dtype dtype, const std::string& whose = {}) {
  constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
  require(dtype >= 0 && dtype <= GW_FLOAT16, "{}dtype {} is none of GW_FLOAT32, GW_BFLOAT16, GW_FLOAT16",
          whose, dtype);
  return kTypes[dtype];
}

// Returns the name that frameworks use for the type.
constexpr const char* long_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
}

}  // namespace gradwire::c_api
