// The grid mode in float32: blocks anywhere on the device hand h(t) to each other through global memory, one value and
// the number of its step to a 64-bit word.
//
// float32 has no bit that says whether a packet is new (packets.cuh), so every value comes with its step, as the long
// packets of 16-bit types do, and for the same reasons nothing needs a fence or a reset (docs/design.md). What a block
// polls goes into shared memory, where its product reads it; two buffers, so that one barrier per step does.
#pragma once

#include "fma.cuh"

namespace flashrnn::cuda {

template <class C>
struct FmaExchange<C, Mode::kGrid> {
  using F = Fma<C>;
  static constexpr int kCopyBytes = C::kD * C::kRows * 8, kSlotBytes = C::kReplicas * kCopyBytes;
  static constexpr int kGroupBytes = 2 * kSlotBytes;
  static constexpr int kVectors =
      (kCopyBytes / 16 + C::kThreads - 1) / C::kThreads;  // of two words, that a thread polls
  static_assert(kGroupBytes <= kGridBytesPerUnit * C::kD && C::kD <= kLargestGridHead, "config.h bounds the memory");
  static_assert(C::kReplicas <= F::kCopies, "each lane with the pair writes one copy");

  const char* from;  // this thread's first vector in the first slot of the copy that the block reads
  char* to;          // the lane's word in the first slot of the copy that it writes
  float2* hidden;    // where the first vector goes in shared memory
  bool sends;

  __device__ __forceinline__ FmaExchange(const Tensors& t, char* shared, const Place& place, const FmaLane<C>& lane)
      : hidden(reinterpret_cast<float2*>(shared + F::kHidden) + lane.thread) {
    const int block = static_cast<int>(blockIdx.x), copy = lane.slice % F::kCopies;
    char* const group = static_cast<char*>(t.workspace) + static_cast<std::int64_t>(block / C::kBlocks) * kGroupBytes;
    from = group + block % C::kReplicas * kCopyBytes + lane.thread * 16;
    to = group + copy % C::kReplicas * kCopyBytes + (lane.row * C::kD + place.first_unit + lane.unit) * 8;
    sends = copy < C::kReplicas;
  }
  __device__ __forceinline__ void ready() { __syncthreads(); }

  // All of h(s) into a buffer. Gives up, which ends the kernel with an error, after `limit` polls.
  __device__ __forceinline__ void wait(int s, int buffer, std::uint32_t limit) {
    if (s == 0) return;  // h(0) is there
    const std::uint32_t step = static_cast<std::uint32_t>(s);
    std::uint64_t words[kVectors][2];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      words[v][0] = words[v][1] = 0;
      ptx::load_relaxed_16_if(is_mine(v), words[v][0], words[v][1], at(v, buffer));
    }
    std::uint32_t missing, polls = 0;
    do {
      if (++polls > limit) __trap();
      missing = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t late = is_mine(v) ? (high(words[v][0]) ^ step) | (high(words[v][1]) ^ step) : 0;
        ptx::load_relaxed_16_if(late, words[v][0], words[v][1], at(v, buffer));
        missing |= late;
      }
    } while (missing != 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (is_mine(v)) hidden[buffer * (C::kHiddenBytes / 8) + v * C::kThreads] = {low(words[v][0]), low(words[v][1])};
    }
    __syncthreads();
  }

  __device__ __forceinline__ void send(float h, int s, int buffer, bool wanted) const {
    ptx::store_relaxed_8_if(wanted && sends, to + buffer * kSlotBytes, __float_as_uint(h),
                            static_cast<std::uint32_t>(s));
  }
  __device__ __forceinline__ void end_step() {}
  __device__ __forceinline__ void leave() {}

 private:
  __device__ __forceinline__ bool is_mine(int v) const {
    constexpr int kAll = kCopyBytes / 16;
    return (v + 1) * C::kThreads <= kAll || static_cast<int>(threadIdx.x) + v * C::kThreads < kAll;
  }
  __device__ __forceinline__ const char* at(int v, int buffer) const {
    return from + buffer * kSlotBytes + v * C::kThreads * 16;
  }
  __device__ __forceinline__ static float low(std::uint64_t x) {
    return __uint_as_float(static_cast<std::uint32_t>(x));
  }
  __device__ __forceinline__ static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }
};

}  // namespace flashrnn::cuda
