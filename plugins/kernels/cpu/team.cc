#include "team.h"

#include <sched.h>

namespace flashrnn::cpu {
namespace {

void pause() noexcept {
#ifdef FLASHRNN_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A chunk takes microseconds: a wait longer than the spin means that its thread lost its core.
void wait_until(const std::atomic<std::int64_t>& finished, std::int64_t count) noexcept {
  constexpr int kSpins = 2000;
  for (int spin = 0; finished.load(std::memory_order_acquire) < count; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      sched_yield();
    }
  }
}

void try_chunk(Progress& p, std::int64_t step, int chunk) noexcept {
  std::int64_t expected = step;
  if (p.claimed[chunk].load(std::memory_order_relaxed) != step) return;
  if (!p.claimed[chunk].compare_exchange_strong(expected, step + 1, std::memory_order_relaxed)) return;
  const int groups = p.recurrence.groups;
  p.step(p.recurrence, step, groups * chunk / p.chunks, groups * (chunk + 1) / p.chunks);
  p.finished.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace

void join(Progress& p) noexcept {
  const int me = p.workers.fetch_add(1, std::memory_order_relaxed);
  if (me >= p.chunks) return;
  for (;;) {
    const std::int64_t step = p.finished.load(std::memory_order_acquire) / p.chunks;
    if (step >= p.recurrence.T) return;
    // Each thread starts with its own share, so that its part of R stays in its cache, and ends with what others left.
    // The direction alternates with the step, as in step_blocks.
    int workers = p.workers.load(std::memory_order_relaxed);
    workers = workers < p.chunks ? workers : p.chunks;
    const int begin = p.chunks * me / workers, end = p.chunks * (me + 1) / workers;
    for (int i = 0; i < p.chunks; ++i) {
      const int chunk = step & 1 ? end - 1 - i + p.chunks : begin + i;
      try_chunk(p, step, chunk % p.chunks);
    }
    wait_until(p.finished, (step + 1) * p.chunks);
  }
}

}  // namespace flashrnn::cpu
