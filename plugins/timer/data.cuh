// Device memory for the timer: buffers, inputs drawn on the device, and the comparison of two outputs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../kernels/cuda/elements.cuh"

namespace flashrnn::timer {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Bytes on the device, NaN in every dtype until something is written.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes == 0 ? 1 : bytes));
    poison();
  }
  ~Buffer() { (void)cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void poison() { check(cudaMemset(data_, 0xFF, bytes_)); }
  void* get() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

constexpr unsigned kBlocks = 1024, kThreads = 256;

// In (-1, 1), a function of the index and the seed alone.
__device__ inline float uniform(std::uint64_t index, std::uint32_t seed) {
  std::uint64_t x = index * 0x9E3779B97F4A7C15u + seed * 0xD1B54A32D192ED03u;  // splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<float>(static_cast<std::uint32_t>((x ^ (x >> 31)) >> 40)) * 0x1p-23f - 1.0f;
}

template <class E>
__global__ void fill_kernel(E* out, std::size_t count, float scale, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads) {
    out[i] = cuda::from_float<E>(scale * uniform(i, seed));
  }
}

// Random values of standard deviation `deviation`.
inline void fill(void* out, DType dtype, std::size_t count, float deviation, std::uint32_t seed) {
  const float scale = deviation * 1.7320508f;
  if (dtype == DType::kFloat32) {
    fill_kernel<<<kBlocks, kThreads>>>(static_cast<float*>(out), count, scale, seed);
  } else if (dtype == DType::kFloat16) {
    fill_kernel<<<kBlocks, kThreads>>>(static_cast<__half*>(out), count, scale, seed);
  } else {
    fill_kernel<<<kBlocks, kThreads>>>(static_cast<__nv_bfloat16*>(out), count, scale, seed);
  }
  check(cudaGetLastError());
}

// 1 + |x|: a normalizer of the sLSTM.
static __global__ void make_normalizer(float* values, std::size_t count) {
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads) {
    values[i] = 1.0f + fabsf(values[i]);
  }
}

// worst[0] = max |a - b|, worst[1] = max |b|, as bits: those of numbers that are not negative order as integers do, and
// NaN, its sign cleared, is beyond all of them.
template <class E>
__global__ void compare_kernel(const E* a, const E* b, std::size_t count, unsigned* worst) {
  float difference = 0.0f, largest = 0.0f;
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads) {
    const float y = cuda::to_float(b[i]), d = fabsf(cuda::to_float(a[i]) - y);
    if (!(d <= difference)) difference = d;
    if (isnan(d)) break;
    largest = fmaxf(largest, fabsf(y));
  }
  atomicMax(worst, __float_as_uint(fabsf(difference)));
  atomicMax(worst + 1, __float_as_uint(largest));
}

// The largest difference relative to the largest expected value, at least 1 (compare.py); NaN where one is NaN.
inline float error_of(const void* actual, const void* expected, DType dtype, std::size_t count) {
  Buffer worst(2 * sizeof(unsigned));
  check(cudaMemset(worst.get(), 0, 2 * sizeof(unsigned)));
  unsigned* const to = static_cast<unsigned*>(worst.get());
  const auto compare = [&](auto* type) {
    using E = decltype(type);
    compare_kernel<<<kBlocks, kThreads>>>(static_cast<E>(actual), static_cast<E>(expected), count, to);
  };
  if (dtype == DType::kFloat32) {
    compare(static_cast<const float*>(nullptr));
  } else if (dtype == DType::kFloat16) {
    compare(static_cast<const __half*>(nullptr));
  } else {
    compare(static_cast<const __nv_bfloat16*>(nullptr));
  }
  check(cudaGetLastError());
  float found[2];
  check(cudaMemcpy(found, to, sizeof(found), cudaMemcpyDeviceToHost));
  return found[0] / (found[1] > 1.0f ? found[1] : 1.0f);
}

}  // namespace flashrnn::timer
