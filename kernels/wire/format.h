// Wire formats: how a run of FP32 values becomes bytes, and the two ops per format that collectives need.
//
// S below is the value that a rank sends: its gradient, plus the residual of the last step, plus the values
// received from other ranks. The wire carries round(S); the residual becomes S - round(S), so no part of S is
// lost.
//
// Non-finite S: the wire carries S, as NaN where the format has no infinity, because the user must see it.
// The residual becomes 0, so that the non-finite value does not spread to later steps. The finite values of
// the block are sent as if the non-finite value were 0; with `masks`, finite values of the block are not sent
// and stay in the residual. A finite S never becomes non-finite on the wire: S saturates, and the residual
// keeps the rest.
//
// Stochastic rounding draws from random16(seed, *step, element index) of kernels/math/random.h, so a rank's
// results repeat; give each rank a different seed. `first_element` is the index of a call's element 0 within
// the whole bucket, so that the results do not depend on how a bucket is cut into calls.
//
// Alignment: any for floats (16 bytes is fast), 16 bytes for encoded values. Limit: memory bandwidth.
// Deterministic.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/op.h"

namespace gradwire {

// The options of a wire format in its specs, `int4:block=64`; each format describes its options.

// A member of a format that a spec may set. Its value is an index into `words` or, without words, a number
// from `least` to `most`.
struct FormatOption {
  const char* key;
  int* value;
  std::vector<const char*> words = {};
  int least = 0, most = 0;
  bool power_of_two = false;

  // Sets the member from `text`. Returns false when `text` is not a legal value.
  bool set(std::string_view text) const;
  std::string text() const;   // returns the text of the current value
  std::string legal() const;  // returns "pow2|fp32" or "a power of two from 32 to 512"
};

inline FormatOption block_option(int* value, int least = 32, int most = 512) {
  return {.key = "block", .value = value, .least = least, .most = most, .power_of_two = true};
}

// Keeps an average within FP32's range where the sum would overflow. The rank that sums parts multiplies each
// part by a power of two, at most 1 / ranks. At the end it multiplies the sum by the remaining factor. Parts
// are sent unscaled; sums of parts are sent scaled.
//
// A power of two does not change any rounding, neither in sums nor in formats. Results and residuals
// therefore have the bits of a sum that is divided afterwards. Exception: scaled values below the smallest
// normal float, 1.2e-38. (For such values, a product and its addition may be rounded once, as on a GPU, or
// twice.)

// The largest number of inputs of one op.
inline constexpr int kMaxInputs = 64;

// The scales of an op's inputs, initially 1.
struct InputScales {
  float of[kMaxInputs];
  constexpr InputScales() : of() {
    for (float& scale : of) scale = 1.0f;
  }
};

// Returns the power of two by which each part is multiplied if the result is `scale` times the sum of the
// parts: the largest power that is at most `scale` and at most 1.
inline float part_scale_for(float scale) {
  float part = 1.0f;
  while (0 < scale && scale < part && part > 0x1p-100f) part *= 0.5f;
  return part;
}

// Returns the encoding error of a sum as a residual in the units of a part; 0 if the residual overflows a
// float or the sum is not finite. `unit` is the inverse of the part's scale in the sum.
GW_HD float to_residual(float rest, float unit) {
  rest *= unit;
  return is_finite(rest) ? rest : 0.0f;
}

enum class Rounding : uint8_t { nearest, stochastic };

struct WireRounding {
  Rounding mode = Rounding::nearest;
  uint64_t seed = 0;
  const uint64_t* step = nullptr;  // device memory; null means 0
  int64_t first_element = 0;
};
GW_HD uint64_t step_of(const WireRounding& rounding) {
  return rounding.step != nullptr ? *rounding.step : 0;
}

// Arguments of an encode: S = inputs[0..own_position) + (own + residual) + inputs[own_position..num_inputs),
// in FP32, added in this order. The order is part of the contract, so that every transport and device gives
// the same bits. Then wire = round(S), residual = S - wire, out = out_scale * decode(wire). Without a wire,
// out gets S unrounded, and the residual, which is part of S, becomes 0.
//
// Each term of S has its scale, a power of two: input_scale(k) * inputs[k] and
// own_scale * (own + residual_scale * residual). The new residual is divided by own_scale * residual_scale;
// where that overflows a float, the residual becomes 0.
// Bytes per element, for w bytes on the wire: 12 + w (1 + num_inputs) with a residual, 4 + w (1 + num_inputs)
// without; + 4 with out.
struct ReduceEncode {
  const void* inputs[kMaxInputs] = {};  // each input has bytes(count) bytes
  InputScales input_scales = {};
  int num_inputs = 0;
  int own_position = 0;        // 0..num_inputs
  const float* own = nullptr;  // (count)
  float* residual = nullptr;   // (count) in and out; null: no error feedback
  void* wire = nullptr;        // out: bytes(count) bytes; null: no encode
  float* out = nullptr;        // (count) out; optional with a wire; may equal own
  float own_scale = 1.0f, residual_scale = 1.0f;
  float out_scale = 1.0f;
  int64_t count = 0;
  WireRounding rounding = {};  // ignored by formats without stochastic rounding
  GW_HD float input_scale(int k) const { return input_scales.of[k]; }
};

// Returns the scale from S to residual units.
GW_HD float residual_unit(const ReduceEncode& a) {
  // The scale is a power of two from 2^-126 to 1, and so this is its inverse.
  return bits_float(0x7f000000u - float_bits(a.own_scale * a.residual_scale));
}

namespace cuda {
// The variants of an encode kernel: sum without encoding, or a rounding mode.
enum class Coding { none, nearest, stochastic };

inline Coding coding_of(const ReduceEncode& a) {
  if (a.wire == nullptr) return Coding::none;
  return a.rounding.mode == Rounding::nearest ? Coding::nearest : Coding::stochastic;
}
}  // namespace cuda

// Arguments of a decode: out = scale * decode(wire). Where `out` is not finite, the residual becomes 0: the
// part kept by earlier encodes of these elements must not spoil later steps. Bytes per element: 4 + w.
struct Decode {
  const void* wire = nullptr;  // bytes(count) bytes
  float* out = nullptr;        // (count)
  float scale = 1.0f;
  int64_t count = 0;
  float* residual = nullptr;  // (count); written only where out is not finite; may be null
};

// A format with its options; the only interface for code outside this folder. The table has one
// format per name, with default options.
class WireFormat {
 public:
  constexpr virtual ~WireFormat() = default;

  const char* name = "";
  const char* options = "";  // the options that differ from the default: "block=64,rotate=hadamard"
  const char* summary = "";  // a few words on the encoding, for help texts and the docs' table
  const char* source = "";   // the paper or specification of the format
  // True if the encoding is the floats themselves. Values are sent from, and received into, the caller's
  // buffer and are summed by fp32_reduce. There are no other ops.
  bool exact = false;
  bool stochastic = false;                // accepts round=stochastic
  Rounding rounding = Rounding::nearest;  // unless the spec says otherwise
  // True if a block with non-finite values is sent as a mask of these values. The finite values of the block
  // are sent as 0 and stay in the residual (block.h).
  bool masks = false;
  // True if a block's largest values are clamped, so that stochastic rounding is unbiased only for the other
  // values.
  bool clips = false;
  bool selects = false;  // sends some of a block's values; a non-finite value replaces another value
  // True if the program registered the format at run time (registered.h). Such a format runs on the host only
  // and may differ between ranks.
  bool registered = false;
  int64_t granularity = 8;  // chunks begin at multiples of this many values, the beginning of a block
  // Expected squared error of one encode with `rounding` over the squared norm, on Gaussian values; a test
  // requires the format to be within 5 % of it. 0: exact, or unknown for these options.
  double gaussian_error = 0;
  // Bounds the squared error of one encode over the square of S, in the L2 norm or the largest magnitude,
  // whichever gives the lower bound. With stochastic rounding the bound applies to the expected value. With a
  // bound below 1, an encode contracts: error feedback keeps a bounded residual. With a bound of 1 or above,
  // the residual may grow from step to step. 0: exact, or unknown. For terngrad the bound holds for blocks
  // without clipped values.
  virtual double error_bound(Rounding rounding) const = 0;

  virtual int64_t bytes(int64_t count) const = 0;
  virtual void reduce_encode(const Stream&, const ReduceEncode&) const = 0;
  virtual void decode(const Stream&, const Decode&) const = 0;
  // Run the scalar references of encode and decode, on the host, for tests.
  virtual void reference_reduce_encode(const ReduceEncode&) const = 0;
  virtual void reference_decode(const Decode&) const = 0;

  // Return the options that a spec can set, and any conflict: choices() returns the options that a spec can
  // set. problem() returns why their values conflict, or "".
  virtual std::vector<FormatOption> choices() { return {}; }
  virtual std::string problem() const { return {}; }
  // Recomputes the derived fields.
  virtual void settle() {}
  // Returns options whose code deserves a separate test or bench.
  virtual std::vector<const char*> examples() const { return {}; }
  // Returns a copy of the format; null if it has no options.
  virtual std::unique_ptr<WireFormat> copy() const { return nullptr; }

  // Returns whether zero always decodes to zero. All formats without a code for zero send masks.
  bool keeps_zero() const { return !masks && !selects && !registered; }
  double bytes_per_value() const { return static_cast<double>(bytes(1 << 20)) / (1 << 20); }
  // Returns the spec, such as "int4:block=64".
  std::string spec() const { return std::string(name) + (*options != 0 ? ":" : "") + options; }
  // Returns all that ranks must agree on. The meaning of a spec differs between ranks only for registered
  // formats.
  std::string identity() const {
    if (!registered) return spec();
    return spec() + " in " + std::to_string(bytes(granularity)) + " bytes per " +
           std::to_string(granularity) + " values";
  }
};

// Formats live as long as the program, one per spec, so equal formats are the same object.
using Wire = const WireFormat*;

// The table of wire formats. The spec grammar, collectives, tests, benches and the docs' table are derived
// from the table.

// The formats that other code names; all others are found by name only.
extern const Wire kFp32, kBf16;

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

// Returns the options of a format's specs for lists of formats: {"block=32", "8..1024"}, with the default.
std::vector<std::pair<std::string, std::string>> option_texts(Wire format);
// Returns all formats of the table, plus variants with options whose code differs, for tests and benches.
std::vector<Wire> example_wire_formats();

}  // namespace gradwire
