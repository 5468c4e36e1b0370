// The CPU kernel: every cell, dtype, direction and layout of the op. The caller owns all memory; nothing is allocated.
//
// Chunked equals whole bitwise: a call that starts from the final states of another one continues it exactly. No result
// depends on the number of threads, on T, or on the other rows of the batch.
#pragma once

#include <cstddef>

#include "../op.h"

namespace flashrnn::cpu {

// The caller's thread pool: runs task(argument, i) for each i below count, in any order, on any number of threads (one
// will do), and returns when all have returned.
struct ThreadPool {
  void (*run)(void* context, void (*task)(void* argument, std::size_t i), std::size_t count, void* argument);
  void* context;
};

inline constexpr std::size_t kAlignment = 64;  // of `packed` and `workspace`

// `r` rearranged for the vectors of this processor, in its own dtype. Reads cell, dtype, N, H, D and r of params.
std::size_t packed_bytes(const Params& params) noexcept;
void pack(const Params& params, void* packed) noexcept;

// Scratch of one call, any content on entry.
std::size_t workspace_bytes(const Params& params) noexcept;

// Run the op. params.r is not read: `packed` stands for it and may be shared by concurrent calls.
void run(const Params& params, const void* packed, void* workspace, const ThreadPool& pool) noexcept;

const char* instruction_set() noexcept;  // "baseline", "avx2" or "avx512": what run() uses on this machine

}  // namespace flashrnn::cpu
