// Compiles a schedule into a program. Internal to program.cpp.
//
// The compiler walks one rank's rounds and emits, for each, the kernels that must run before its exchange,
// the exchange, and the kernels that depend on what it received. Then it orders the kernels for in-order
// streams: those that the next exchange depends on come before those that can wait, and a kernel that depends
// on exchange k comes after those that don't, so that it runs while exchange k + 1 is in flight.
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
    int slot;                   // -1: it is elsewhere
    float scale;                // of a part by itself; 1 of a sum of parts
    void* elsewhere = nullptr;  // in a window of the node
  };
  struct Form {
    const void* data = nullptr;
    bool there = false;
    int made_by = -1;  // index of the kernel; -1: it was received, or is the caller's
  };
  // What this rank holds of one chunk.
  struct ChunkState {
    ChunkRange range;
    bool owner = false;
    const float* own = nullptr;  // this rank's part; null if it has none, in an all_gather
    float* residual = nullptr;   // of this rank's encode
    float* exact = nullptr;      // the place of the FP32 sum and of the final value
    void* wire = nullptr;        // the place of the encoded chunk, in the workspace
    std::vector<Input> encoded_inputs, exact_inputs;
    bool closed = false;        // the partial sum is complete and emitted, or the final value was received
    bool sent_encoded = false;  // this rank's own sum is sent in the wire format at some point
    Form encoded_form, exact_form;  // of what is sent from now on
    int arrived = -1;               // the last exchange that received anything for it
    int64_t place = 0;              // in a half of a window of the node
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
  // Addresses are computed as integers because the measuring pass has no base to add to.
  void* address(size_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  void* reserve(int64_t bytes);
  void* slot(int index) const { return address(reserved_ + static_cast<size_t>(index) * slot_bytes_); }
  int take_slot();
  void* place_of(const Input& input) const { return input.slot >= 0 ? slot(input.slot) : input.elsewhere; }

  void place_chunks(const float* in, float* out);
  void look_ahead();
  void round(int k);
  // Over node windows: whether the step is a matter of the windows, and where its chunk lies in that of a rank.
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
  // Whether what `rank` sends of chunk c in round k is its own part alone.
  bool sends_a_part(int rank, int c, int k);
  void put_in_order();
  [[noreturn]] void refuse(const std::string& why) const;

  Program& program_;
  const Wire wire_;
  const int rank_;
  const float part_scale_, result_scale_;  // of parts as they are added up, and of their sum
  const uintptr_t base_;
  const PeerWindows* const node_;  // null: everything is sent
  std::vector<ChunkState> chunks_;
  size_t reserved_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once the kernel that reads it is emitted
  int slots_ = 0;
  std::vector<Exchange> exchanges_;  // one per round, possibly empty
  std::vector<Kernel> kernels_;
  std::vector<std::vector<int>> first_sum_;  // [rank][chunk] the first round in which it adds; on request
};

}  // namespace gradwire
