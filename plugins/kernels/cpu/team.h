// Threads that advance recurrences together, step by step, without a barrier and without knowing how many they are.
//
// The units of a recurrence are cut into chunks. A thread claims (chunk, step) pairs; a pair of step s may be claimed
// when all of step s - 1 is finished. Whatever is waited for has been claimed by a thread that is running, so one
// thread alone makes progress, late threads join, and a slow one is overtaken: no pool, however small or busy, can
// deadlock. A pool's own parallel loop once per step costs 3-10 us a step; a claim costs 20 ns alone, a finished step
// 0.2 us shared.
#pragma once

#include <atomic>
#include <cstdint>

#include "step.h"

namespace flashrnn::cpu {

inline constexpr int kMaxChunks = 16;

struct alignas(64) Progress {
  Recurrence recurrence;
  Step step;
  int chunks;  // groups are dealt to them evenly

  alignas(64) std::atomic<int> workers{0};
  alignas(64) std::atomic<std::int64_t> finished{0};               // (chunk, step) pairs
  alignas(64) std::atomic<std::int64_t> claimed[kMaxChunks] = {};  // steps claimed of each chunk
};

// Work on the recurrence until all its steps are finished; return at once where enough threads do already.
void join(Progress& progress) noexcept;

}  // namespace flashrnn::cpu
