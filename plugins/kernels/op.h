// The FlashRNN op family as plain data: the mirror of flashrnn_deploy/op.py and cells.py (a test keeps them equal), and
// Params, the one struct that crosses from a binding to a kernel.
//
// Letters: T steps, B batch, N directions, H heads, D head_dim, G gates, Gb biases, S states.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashrnn {

inline constexpr const char* kDomain = "flashrnn";
inline constexpr int kOpsetVersion = 1;

enum class Cell : int { kLstm, kGru, kElman, kSlstm };
enum class DType : int { kFloat32, kFloat16, kBfloat16 };

inline constexpr const char* kInputs[] = {"wx", "r", "b", "sequence_lens", "initial_states"};
inline constexpr const char* kOutputs[] = {"y", "final_states"};
enum Input : int { kWx, kR, kB, kSequenceLens, kInitialStates, kNumInputs };
enum Output : int { kY, kFinalStates, kNumOutputs };

// Names, and the letters of gates, biases and states in memory order.
struct OpInfo {
  Cell cell;
  const char* op_type;
  const char* gates;
  const char* biases;
  const char* states;
};
inline constexpr OpInfo kOps[] = {
    {Cell::kLstm, "FlashLSTM", "ifzo", "ifzo", "hc"},
    {Cell::kGru, "FlashGRU", "run", "runq", "h"},
    {Cell::kElman, "FlashElman", "z", "z", "h"},
    {Cell::kSlstm, "FlashSLSTM", "ifzo", "ifzo", "hcnm"},
};

constexpr int length(const char* letters) { return *letters == 0 ? 0 : 1 + length(letters + 1); }
constexpr const OpInfo& info(Cell cell) { return kOps[static_cast<int>(cell)]; }
constexpr int num_gates(Cell cell) { return length(info(cell).gates); }
constexpr int num_biases(Cell cell) { return length(info(cell).biases); }
constexpr int num_states(Cell cell) { return length(info(cell).states); }
constexpr int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Attributes of a node. Every node writes all those that its op has: layout, reverse and clip, FlashElman relu,
// FlashSLSTM normalizer_floor.
struct Attributes {
  int layout = 0;                 // 1: wx and y are [B, T, ...]
  int reverse = 0;                // 1: a single direction runs backward
  float clip = 0.0f;              // bound of every activation's input, 0 = none
  int relu = 0;                   // 1: ReLU in place of tanh
  float normalizer_floor = 0.0f;  // smallest sLSTM normalizer
};
constexpr bool has_relu(Cell cell) { return cell == Cell::kElman; }
constexpr bool has_normalizer_floor(Cell cell) { return cell == Cell::kSlstm; }

// Calls visit(name, value) for each attribute that nodes of this cell write, INTs as int and FLOATs as float.
// `Record` is Attributes, or const Attributes.
template <class Record, class Visit>
void for_each_attribute(Cell cell, Record& attributes, Visit&& visit) {
  visit("layout", attributes.layout);
  visit("reverse", attributes.reverse);
  visit("clip", attributes.clip);
  if (has_relu(cell)) visit("relu", attributes.relu);
  if (has_normalizer_floor(cell)) visit("normalizer_floor", attributes.normalizer_floor);
}

// One call of the op. Direction n runs backward when n + reverse is odd.
//
// Pointers may have any alignment that suits their element type. Inputs are never written. No output overlaps an input
// or the other output. A pointer to a tensor without elements may be null.
struct Params {
  Cell cell = Cell::kLstm;
  DType dtype = DType::kFloat32;  // of wx, r and y
  Attributes attributes;
  std::int64_t T = 0, B = 0, N = 1, H = 1, D = 1;

  const void* wx = nullptr;                     // [T, B, N, H, D, G], layout 1: [B, T, N, H, D, G]
  const void* r = nullptr;                      // [N, G, H, D, D] as (out, in)
  const float* b = nullptr;                     // [N, Gb, H, D]
  const std::int32_t* sequence_lens = nullptr;  // [num_lens], any values: the kernel clamps them to 0..T
  std::int64_t num_lens = 1;                    // B, or 1: the same length for every row
  const float* initial_states = nullptr;        // [S, N, B, H, D]
  void* y = nullptr;                            // [T, B, N, H, D], layout 1: [B, T, N, H, D]; every element is written
  float* final_states = nullptr;                // [S, N, B, H, D]; every element is written
};

}  // namespace flashrnn
