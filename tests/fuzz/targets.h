// Fuzz targets: parsers of untrusted input, as functions of arbitrary bytes. A target may reject its input
// with the exception that the parser's callers expect. Any other failure is a defect.
//
// Each target has a file, and a line in this header. `make test` replays each target's seeds and its folder
// in tests/fuzz/corpus, with mutations (replay.cpp). `make soak SOAK=fuzz` searches for new inputs under
// libFuzzer (libfuzzer.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace gradwire::fuzz {

using Input = std::span<const uint8_t>;

using Bytes = std::vector<uint8_t>;

struct Target {
  std::string_view name;
  void (*run)(Input input);
  std::vector<Bytes> (*seeds)();  // valid inputs in the current formats
};

#define GW_FUZZ_TARGET(name) \
  void name(Input input);    \
  std::vector<Bytes> name##_seeds()

GW_FUZZ_TARGET(arrays);         // .npy files of images and labels
GW_FUZZ_TARGET(checkpoint);     // the files of a checkpoint, as read by --resume and --init
GW_FUZZ_TARGET(cifar);          // CIFAR-10's batches
GW_FUZZ_TARGET(handshake_in);   // the accepting side, before the connector is authenticated
GW_FUZZ_TARGET(handshake_out);  // the connecting side
GW_FUZZ_TARGET(idx);            // IDX files, plain or gzip
GW_FUZZ_TARGET(log);            // the log of an earlier run, and of a run watched by gradwire top
GW_FUZZ_TARGET(message);        // control messages between processes
GW_FUZZ_TARGET(safetensors);    // safetensors files of other programs
GW_FUZZ_TARGET(settings);       // specs and values of the command line
GW_FUZZ_TARGET(state);          // a reducer's saved state
GW_FUZZ_TARGET(store);          // frames of the rendezvous store
GW_FUZZ_TARGET(tuning);         // the file of GRADWIRE_TUNING, and the choices made with it

#undef GW_FUZZ_TARGET

#define GW_FUZZ_TARGET(name)  \
  Target {                    \
#name, name, name##_seeds \
  }
inline constexpr std::array kTargets{
    GW_FUZZ_TARGET(arrays),        GW_FUZZ_TARGET(checkpoint),  GW_FUZZ_TARGET(handshake_in),
    GW_FUZZ_TARGET(handshake_out), GW_FUZZ_TARGET(cifar),       GW_FUZZ_TARGET(idx),
    GW_FUZZ_TARGET(log),           GW_FUZZ_TARGET(safetensors), GW_FUZZ_TARGET(settings),
    GW_FUZZ_TARGET(state),         GW_FUZZ_TARGET(store),       GW_FUZZ_TARGET(message),
    GW_FUZZ_TARGET(tuning),
};
#undef GW_FUZZ_TARGET

inline Bytes bytes_of_text(std::string_view text) {
  return {text.begin(), text.end()};
}

}  // namespace gradwire::fuzz
