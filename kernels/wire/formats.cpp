// The table of wire formats, and the way from a stream to the device's side of each op.
#include "kernels/wire/formats.h"

#include "kernels/wire/bf16.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/fp8.h"

namespace gradwire {

// An entry's way to the sides of an op.
#ifdef GRADWIRE_SIMT_TESTS
// Where CUDA kernels run on the CPU there is no CUDA stream to name them by: the table leads to them alone.
#define GW_OP(op) [](const Stream&, const auto& args) { cuda::op(nullptr, args); }
#else
#define GW_OP(op)                                                    \
  [](const Stream& stream, const auto& args) {                       \
    detail::dispatch(stream, args, host::op, GW_CUDA_SIDE(op), #op); \
  }
#endif
#define GW_OPS(NAME)                                                            \
  .reduce_encode = GW_OP(NAME##_reduce_encode), .decode = GW_OP(NAME##_decode), \
  .reference_reduce_encode = reference::NAME##_reduce_encode, .reference_decode = reference::NAME##_decode

const WireFormat kFp32Format = {
    .name = "fp32",
    .summary = "the values themselves",
    .source = "IEEE 754",
    .exact = true,
    .stochastic = false,
    .granularity = 8,
    .bytes = [](int64_t count) { return count * 4; },
    .gaussian_error = 0,
    .reduce_encode = nullptr,
    .decode = nullptr,
    .reference_reduce_encode = nullptr,
    .reference_decode = nullptr,
};

const WireFormat kBf16Format = {
    .name = "bf16",
    .summary = "the upper halves of the floats",
    .source = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
    .exact = false,
    .stochastic = true,
    .granularity = 8,
    .bytes = [](int64_t count) { return count * 2; },
    .gaussian_error = 2.7e-6,
    GW_OPS(bf16),
};

const WireFormat kFp8Format = {
    .name = "fp8",
    .summary = "E4M3 with a power-of-two scale per 128 values",
    .source = "OCP's 8-bit Floating Point Specification and Microscaling Formats",
    .exact = false,
    .stochastic = true,
    .granularity = kFp8Block,
    .bytes = fp8_wire_bytes,
    .gaussian_error = 7.1e-4,
    GW_OPS(fp8),
};

namespace {

#define GW_DEFINE(F, NAME)                 \
  constexpr WireFormat k##F##Format = {    \
      .name = #NAME,                       \
      .summary = F::kSummary,              \
      .source = F::kSource,                \
      .exact = false,                      \
      .stochastic = F::kStochastic,        \
      .granularity = F::kBlock,            \
      .bytes = Packed<F>::bytes,           \
      .gaussian_error = F::kGaussianError, \
      GW_OPS(NAME),                        \
  };
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

#define GW_DEFINE(F, NAME) &k##F##Format,
constexpr Wire kFormats[] = {kFp32, kBf16, kFp8, GW_BLOCK_FORMATS(GW_DEFINE)};
#undef GW_DEFINE

}  // namespace

std::span<const Wire> wire_formats() {
  return kFormats;
}

Wire find_wire_format(std::string_view name) {
  for (Wire format : kFormats) {
    if (format->name == name) return format;
  }
  return nullptr;
}

}  // namespace gradwire
