// The table of wire formats, and the way from a stream to the device's side of each op.
#include "kernels/wire/formats.h"

#include "kernels/wire/bf16.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/fp32.h"
#include "kernels/wire/fp8.h"

namespace gradwire {

GW_DEFINE_OP(fp32_reduce, Reduce)

#ifdef GRADWIRE_SIMT_TESTS
// Where CUDA kernels run on the CPU there is no CUDA stream to name them by: the table leads to them alone.
#define GW_TABLE_OP(op, Args)                \
  void op(const Stream&, const Args& args) { \
    cuda::op(nullptr, args);                 \
  }
#else
#define GW_TABLE_OP(op, Args) GW_DEFINE_OP(op, Args)
#endif
#define GW_TABLE_OPS(NAME)                        \
  GW_TABLE_OP(NAME##_reduce_encode, ReduceEncode) \
  GW_TABLE_OP(NAME##_decode, Decode)

GW_TABLE_OPS(bf16)
GW_TABLE_OPS(fp8)
#define GW_DEFINE(F, NAME) GW_TABLE_OPS(NAME)
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

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
    .reduce_encode = bf16_reduce_encode,
    .decode = bf16_decode,
    .reference_reduce_encode = reference::bf16_reduce_encode,
    .reference_decode = reference::bf16_decode,
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
    .reduce_encode = fp8_reduce_encode,
    .decode = fp8_decode,
    .reference_reduce_encode = reference::fp8_reduce_encode,
    .reference_decode = reference::fp8_decode,
};

namespace {

template <typename F>
constexpr WireFormat entry(const char* name, void (*reduce_encode)(const Stream&, const ReduceEncode&),
                           void (*decode)(const Stream&, const Decode&),
                           void (*reference_reduce_encode)(const ReduceEncode&),
                           void (*reference_decode)(const Decode&)) {
  return {
      .name = name,
      .summary = F::kSummary,
      .source = F::kSource,
      .exact = false,
      .stochastic = F::kStochastic,
      .granularity = F::kBlock,
      .bytes = Packed<F>::bytes,
      .gaussian_error = F::kGaussianError,
      .reduce_encode = reduce_encode,
      .decode = decode,
      .reference_reduce_encode = reference_reduce_encode,
      .reference_decode = reference_decode,
  };
}

#define GW_DEFINE(F, NAME)                                                                 \
  constexpr WireFormat k##F##Format = entry<F>(#NAME, NAME##_reduce_encode, NAME##_decode, \
                                               reference::NAME##_reduce_encode, reference::NAME##_decode);
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
