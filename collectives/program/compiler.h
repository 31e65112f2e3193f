// How a schedule becomes a program. Internal to program.cpp.
//
// The compiler walks one rank's rounds and writes down, for each, the kernels that must be done before its
// exchange, the exchange, and the kernels that its arrivals allow. Then it puts the kernels in one order, for
// in-order streams: those that the next exchange needs come before those that can wait, and a kernel that
// needs exchange k comes behind those that don't, so that it runs while exchange k + 1 is under way.
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

  // Returns the workspace's size in bytes. Runs twice: without a workspace, to learn that, and with it.
  size_t compile();

 private:
  struct Input {
    int32_t from;
    int slot;
  };
  struct Form {
    const void* data = nullptr;
    bool there = false;
    int made_by = -1;  // index of the kernel; -1: it came by an exchange, or is the caller's
  };
  // What this rank holds of one chunk.
  struct ChunkState {
    ChunkRange range;
    bool owner = false;
    const float* own = nullptr;  // this rank's part; null where an all_gather gives it none
    float* exact = nullptr;      // where it is added up in FP32, and where the final value goes
    void* wire = nullptr;        // its place in the workspace, as the wire has it
    std::vector<Input> encoded_inputs, exact_inputs;
    bool closed = false;        // the partial sum is complete and written down, or the final value has come
    bool sent_encoded = false;  // this rank's own sum leaves in the wire format, somewhere
    Form encoded_form, exact_form;  // of what will be sent from now on
    int arrived = -1;               // the exchange that brought the last of it
  };
  static constexpr int kNever = INT_MAX;
  struct Kernel {
    Operation operation;
    int before = kNever;      // the exchange that needs it
    bool feeds_next = false;  // the next one builds on it
  };

  const std::vector<Round>& rounds() const { return program_.schedule_.rounds[rank_]; }
  bool exact(const Step& step) const;
  int64_t bytes_of(const ChunkState& chunk, bool exact) const;
  // Addresses are computed as integers, because in the measuring pass there is no base to add to.
  void* address(size_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  void* reserve(int64_t bytes);
  void* slot(int index) const { return address(reserved_ + static_cast<size_t>(index) * slot_bytes_); }
  int take_slot();

  void place_chunks(const float* in, float* out);
  void look_ahead();
  void round(int k);
  Transfer send(const Step& step, int k);
  void close(int c);
  void decode(ChunkState& chunk);
  template <typename K>
  int add(const K& kernel, const ChunkState& chunk);
  template <typename Args>
  void merge(std::vector<Input>& inputs, const ChunkState& chunk, Args& args);
  ReduceEncode reduce_encode(ChunkState& chunk, const float* own, float scale, bool encode);
  void put_in_order();
  [[noreturn]] void refuse(const std::string& why) const;

  Program& program_;
  const Wire wire_;
  const int rank_;
  const uintptr_t base_;
  std::vector<ChunkState> chunks_;
  size_t reserved_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once the kernel that reads it is written down
  int slots_ = 0;
  std::vector<Exchange> exchanges_;  // one per round, perhaps empty
  std::vector<Kernel> kernels_;
};

}  // namespace gradwire
