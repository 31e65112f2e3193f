// Wire formats: how a run of FP32 values becomes bytes, and the two ops that a collective needs of each.
//
// S below is the value a rank wants to send: its own gradient, plus the residual it kept last time, plus what
// arrived from other ranks. The wire carries round(S); the residual becomes S - round(S), so nothing is lost.
// Non-finite S: the user must see it, so the wire carries it (as NaN where the format has no infinity), but
// the residual becomes 0, so that it does not spread in time. The finite values of its block are sent as if
// the non-finite value were 0. With `masks` they are not sent and stay in the residual. A finite S never
// becomes non-finite on the wire: it saturates, and the residual keeps the rest.
//
// Stochastic rounding draws from random16(seed, *step, element index) of kernels/math/random.h, so a rank's
// results repeat; give each rank its own seed. `first_element` is the index of element 0 of a call within the
// whole bucket, so that cutting a call into pieces changes nothing.
//
// Alignment: any for floats (16 bytes is fast), 16 bytes for wires. Limit: memory bandwidth. Deterministic.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/op.h"
#include "kernels/wire/options.h"
#include "kernels/wire/part_scale.h"

namespace gradwire {

enum class Rounding : uint8_t { nearest, stochastic };

struct WireRounding {
  Rounding mode = Rounding::nearest;
  uint64_t seed = 0;
  const uint64_t* step = nullptr;  // device memory; null means 0
  int64_t first_element = 0;
};

// S = inputs[0..own_position) + (own + residual) + inputs[own_position..num_inputs), in FP32, one addition
// after the other in this order: it is part of the contract, so that every transport and device gives the
// same bits. Then wire = round(S), residual = S - wire, out = out_scale * (what wire decodes to). Without a
// wire, S goes unrounded into out, and the residual, which is in S, becomes 0.
//
// Each term of S has its scale (part_scale.h), a power of two: input_scale(k) * inputs[k] and
// own_scale * (own + residual_scale * residual). What goes back into the residual is divided by
// own_scale * residual_scale; if that is more than a float holds, none of it is kept.
// Bytes per element, w being the format's: 12 + w (1 + num_inputs) with a residual, 4 + w (1 + num_inputs)
// without; + 4 with out.
struct ReduceEncode {
  const void* inputs[kMaxInputs] = {};  // each bytes(count)
  InputScales input_scales = {};
  int num_inputs = 0;
  int own_position = 0;        // 0..num_inputs
  const float* own = nullptr;  // (count)
  float* residual = nullptr;   // (count) in and out; null: no error feedback
  void* wire = nullptr;        // bytes(count) out; null: nothing is encoded
  float* out = nullptr;        // (count) optional with a wire; may equal own
  float own_scale = 1.0f, residual_scale = 1.0f;
  float out_scale = 1.0f;
  int64_t count = 0;
  WireRounding rounding = {};  // ignored by formats without stochastic rounding
  GW_HD const void* input(int k) const { return inputs[k]; }
  GW_HD float input_scale(int k) const { return input_scales.of[k]; }
};

// What an encode loses of S, times this, is in the residual's units. `Args` is a ReduceEncode or like one.
template <typename Args>
GW_HD float residual_unit(const Args& a) {
  return inverse_part_scale(a.own_scale * a.residual_scale);
}

// out = scale * (what wire decodes to); where that is not finite, the residual becomes 0: what earlier encodes have
// kept of the same elements must not spoil later steps. Bytes per element: 4 + w.
struct Decode {
  const void* wire = nullptr;  // bytes(count)
  float* out = nullptr;        // (count)
  float scale = 1.0f;
  int64_t count = 0;
  float* residual = nullptr;  // (count), written only there; may be null
};

struct FusedAllreduce;  // fused.h

// A format, with its options; everything outside this folder knows it through this alone. The table
// (formats.h) has one of each name, with its options at their defaults.
class WireFormat {
 public:
  constexpr virtual ~WireFormat() = default;

  const char* name = "";
  const char* options = "";  // those that are not at their default: "block=64,rotate=hadamard"
  const char* summary = "";  // what is on the wire, in a few words, for help texts and the docs' table
  const char* source = "";   // the paper or specification
  // An exact format is the floats themselves: it is sent from, and received into, the caller's buffer, added
  // up by fp32_reduce, and has no ops of its own.
  bool exact = false;
  bool stochastic = false;                // has round=stochastic
  Rounding rounding = Rounding::nearest;  // unless a spec says otherwise
  // A block with non-finite values carries a mask of these values, and 0 for the finite values, which stay in
  // the residual (block.h).
  bool masks = false;
  // Cuts off a block's largest values, so that rounding at random has the right mean for the others only.
  bool clips = false;
  bool selects = false;  // sends some of a block's values; one that is not finite takes the place of another
  bool registered = false;  // by the program, at run time (registered.h): host only, and perhaps not the same
                            // on all ranks
  int64_t granularity = 8;  // chunks begin at multiples of so many values, where a block of the format does
  // Expected squared error of one encode with `rounding` over the squared norm, on Gaussian values; a test
  // holds the format to it within 5 %. 0: exact, or not known for these options.
  double gaussian_error = 0;
  // Bounds the squared error of one encode over the square of S, in the L2 norm or the largest magnitude,
  // whichever gives the lower bound. When rounding at random it bounds the expected value. Below 1 an encode
  // contracts: error feedback keeps a bounded residual. At 1 and above the residual may grow from step to
  // step. 0: exact, or unknown. For terngrad the bound holds for blocks in which nothing is clipped.
  virtual double error_bound(Rounding rounding) const = 0;

  virtual int64_t bytes(int64_t count) const = 0;
  virtual void reduce_encode(const Stream&, const ReduceEncode&) const = 0;
  virtual void decode(const Stream&, const Decode&) const = 0;
  // An allreduce of ranks that read each other's memory: one kernel, or the ops above, one after the other.
  virtual void fused_allreduce(const Stream&, const FusedAllreduce&) const;
  // The scalar references of both, on the host, for tests.
  virtual void reference_reduce_encode(const ReduceEncode&) const = 0;
  virtual void reference_decode(const Decode&) const = 0;

  // What a spec can set, and then: why these values do not go together, "" if they do.
  virtual std::vector<FormatOption> choices() { return {}; }
  virtual std::string problem() const { return {}; }
  // Takes over what follows from the options.
  virtual void settle() {}
  // Options whose code is worth a test or a bench of its own.
  virtual std::vector<const char*> examples() const { return {}; }
  // Null when there are no options.
  virtual std::unique_ptr<WireFormat> copy() const { return nullptr; }

  // Whether zero always decodes to zero. All formats without a code for zero send masks.
  bool keeps_zero() const { return !masks && !selects && !registered; }
  double bytes_per_value() const { return static_cast<double>(bytes(1 << 20)) / (1 << 20); }
  // "int4:block=64"
  std::string spec() const { return std::string(name) + (*options != 0 ? ":" : "") + options; }
  // All that ranks must agree on. What a spec names may differ between ranks only if it was registered.
  std::string identity() const {
    if (!registered) return spec();
    return spec() + " in " + std::to_string(bytes(granularity)) + " bytes per " +
           std::to_string(granularity) + " values";
  }
};

// Formats live as long as the program, one for each spec, so two are equal when they are the same object.
using Wire = const WireFormat*;

}  // namespace gradwire
