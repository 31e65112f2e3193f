// Compiles a schedule into a program. Internal to program.cpp.
//
// The compiler walks one rank's rounds. For each it emits the kernels that must run before the exchange, the
// exchange, and the kernels that depend on the received data. Then it orders the kernels for in-order
// streams: kernels that the next exchange depends on come before those that can wait. A kernel that depends
// on exchange k comes after kernels that do not, so that it runs while exchange k + 1 is in flight.
#pragma once

#include <climits>
#include <cstdint>
#include <vector>

#include "collectives/program/program.h"

namespace gradwire {

class Program::Compiler {
 public:
  // `in` and `out` as in ProgramBuffers, in FP32.
  Compiler(Program& program, const float* in, float* out, std::byte* base);

  // Returns the workspace's size in bytes. Runs twice: without a workspace, to measure it, then with it.
  size_t compile();

 private:
  struct Input {
    int32_t from;
    int slot;                   // -1: at `elsewhere`
    float scale;                // of a single part; 1 for a sum of parts
    void* elsewhere = nullptr;  // in a peer window of the node
  };
  struct Form {
    const void* data = nullptr;
    bool there = false;
    int made_by = -1;  // index of the kernel; -1: received, or the caller's
  };
  // This rank's state of one chunk.
  struct ChunkState {
    ChunkRange range;
    bool owner = false;
    const float* own = nullptr;  // this rank's part; null in an all_gather if it has none
    float* residual = nullptr;   // of this rank's encode
    float* exact = nullptr;      // place of the FP32 sum and of the final value
    void* wire = nullptr;        // place of the encoded chunk, in the workspace
    std::vector<Input> encoded_inputs, exact_inputs;
    bool closed = false;        // the partial sum is complete and emitted, or the final value was received
    bool sent_encoded = false;  // this rank's own sum is sent in the wire format at some point
    Form encoded_form, exact_form;  // what is sent from now on
    int arrived = -1;               // the last exchange that received data for it
    int64_t place = 0;              // offset in a half of a peer window
    int exported = -1;              // the last exchange for which it was copied there
  };
  static constexpr int kNever = INT_MAX;
  struct Kernel {
    Operation operation;
    int before = kNever;      // the exchange that depends on it
    bool feeds_next = false;  // the next kernel depends on it
  };

  const std::vector<Round>& rounds() const { return program_.schedule_.rounds[rank_]; }
  bool exact(const Step& step) const;
  int64_t bytes_of(const ChunkState& chunk, bool exact) const;
  // Addresses are integers because the measuring pass has no base to add to.
  void* address(size_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  void* reserve(int64_t bytes);
  void* slot(int index) const { return address(reserved_ + static_cast<size_t>(index) * slot_bytes_); }
  int take_slot();
  void* place_of(const Input& input) const { return input.slot >= 0 ? slot(input.slot) : input.elsewhere; }

  void place_chunks(const float* in, float* out);
  void look_ahead();
  void round(int k);
  // With node windows: whether the step goes through peer windows, and the chunk's place in a rank's window.
  bool in_window(const Step& step) const { return node_ != nullptr && step.intra_node; }
  void* in_window_of(int rank, int k, const ChunkState& chunk) const;
  Transfer send(const Step& step, int k);
  Transfer export_exact(const Step& step, int k);
  void close(int c);
  void decode(ChunkState& chunk);
  template <typename K>
  int add(const K& kernel, const ChunkState& chunk);
  template <typename Args>
  void merge(std::vector<Input>& inputs, const ChunkState& chunk, Args& args);
  ReduceEncode reduce_encode(ChunkState& chunk, const float* own, bool own_is_sum, float scale, bool encode);
  // Returns whether `rank` sends only its own part of chunk c in round k.
  bool sends_a_part(int rank, int c, int k);
  void put_in_order();
  [[noreturn]] void refuse(const std::string& why) const;

  Program& program_;
  const Wire wire_;
  const int rank_;
  const float part_scale_, result_scale_;  // for parts while adding, and for their sum
  const uintptr_t base_;
  const MappedPeers* const node_;  // null: everything is sent
  std::vector<ChunkState> chunks_;
  size_t reserved_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once the kernel that reads it is emitted
  int slots_ = 0;
  std::vector<Exchange> exchanges_;  // one per round, possibly empty
  std::vector<Kernel> kernels_;
  // [rank][chunk]: the first round in which the rank adds; computed on request.
  std::vector<std::vector<int>> first_sum_;
};

}  // namespace gradwire
