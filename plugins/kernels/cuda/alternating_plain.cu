// One step per kernel: what no kernel for all steps serves, or serves slower (alternating_choice.h). R is read from
// memory in every step and products run on the FMA units in float32. Work inside a step is ordered by the stream alone:
// no kernel waits for another one.
//
// A warp owns one unit: its lanes split D, each with the sums of all gates and of kRows batch rows, and a butterfly
// that hands rows to lanes adds them up. h is exchanged in the dtype of r through the workspace, two buffers; the
// running states live in final_states.
#include "alternating_start.cuh"
#include "reduce.cuh"

namespace flashrnn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kVectorBytes = 16;

template <class E>
struct Vector {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(E));
  uint4 bits;
  __device__ __forceinline__ float operator[](int i) const { return to_float(reinterpret_cast<const E*>(&bits)[i]); }
};

template <Cell kCell, DType kType, int kRows>
__global__ void __launch_bounds__(kThreads) step(Tensors t, int s, const Element<kType>* h_old, Element<kType>* h_new) {
  using E = Element<kType>;
  using Step = StepFor<kCell>;
  constexpr int G = Step::G, V = Vector<E>::kSize;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int unit_blocks = (t.D + kWarps - 1) / kWarps, row_blocks = (t.B + kRows - 1) / kRows;
  const int unit = static_cast<int>(blockIdx.x) % unit_blocks * kWarps + warp;
  const int first_row = static_cast<int>(blockIdx.x) / unit_blocks % row_blocks * kRows;
  const int part = static_cast<int>(blockIdx.x) / unit_blocks / row_blocks;  // direction and head
  if (unit >= t.D) return;

  const std::int64_t row_pitch = hidden_pitch(t.D, sizeof(E));
  const E* h_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // rows behind the batch repeat the last one and are not stored
    h_rows[r] = h_old + (static_cast<std::int64_t>(part) * t.B + min(first_row + r, t.B - 1)) * row_pitch;
  }
  const E* weights[G];
#pragma unroll
  for (int g = 0; g < G; ++g) weights[g] = static_cast<const E*>(t.r) + weight_offset(t, G, g, part, unit);

  float sums[kRows][G] = {};
  if (t.wide_r) {
    for (int k = lane * V; k < t.D; k += 32 * V) {
      Vector<E> w[G];
#pragma unroll
      for (int g = 0; g < G; ++g) w[g].bits = __ldg(reinterpret_cast<const uint4*>(weights[g] + k));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Vector<E> h;
        h.bits = *reinterpret_cast<const uint4*>(h_rows[r] + k);
#pragma unroll
        for (int i = 0; i < V; ++i) {
#pragma unroll
          for (int g = 0; g < G; ++g) sums[r][g] = fmaf(w[g][i], h[i], sums[r][g]);
        }
      }
    }
  } else {
    for (int k = lane; k < t.D; k += 32) {
      float w[G];
#pragma unroll
      for (int g = 0; g < G; ++g) w[g] = to_float(weights[g][k]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float h = to_float(h_rows[r][k]);
#pragma unroll
        for (int g = 0; g < G; ++g) sums[r][g] = fmaf(w[g], h, sums[r][g]);
      }
    }
  }
  reduce_items<32>(sums, lane);

  constexpr int kLanesPerRow = 32 / kRows;
  const int row = first_row + lane / kLanesPerRow;
  if (lane % kLanesPerRow != 0 || row >= t.B) return;
  const int n = part / t.H, head = part % t.H;
  const int time = runs_backward(t, n) ? t.T - 1 - s : s;
  const std::int64_t column = (static_cast<std::int64_t>(n) * t.H + head) * t.D + unit;
  float state[Step::S];
#pragma unroll
  for (int i = 0; i < Step::S; ++i) state[i] = t.final_states[state_offset(t, i, part, row, unit)];
  float out = 0.0f;
  if (time < length_of(t, row)) {
    float x[G], b[Step::Gb];
    const E* wx = static_cast<const E*>(t.wx) + time * t.wx_step + row * t.wx_row + column * G;
#pragma unroll
    for (int g = 0; g < G; ++g) x[g] = to_float(wx[g]);
#pragma unroll
    for (int i = 0; i < Step::Gb; ++i) b[i] = t.b[bias_offset(t, Step::Gb, i, part, unit)];
    Step::template step<ScalarMath>(x, sums[0], b, state, t.options);
#pragma unroll
    for (int i = 0; i < Step::S; ++i) t.final_states[state_offset(t, i, part, row, unit)] = state[i];
    out = state[0];
  }
  h_new[(static_cast<std::int64_t>(part) * t.B + row) * row_pitch + unit] = from_float<E>(state[0]);
  static_cast<E*>(t.y)[time * t.y_step + row * t.y_row + column] = from_float<E>(out);
}

template <Cell kCell, DType kType, int kRows>
cudaError_t run(const Params& params, void* workspace, cudaStream_t stream) {
  using E = Element<kType>;
  const Tensors t = tensors_of(params, 0);
  const std::int64_t buffer = params.N * params.H * params.B * hidden_pitch(params.D, sizeof(E));
  E* const h[2] = {static_cast<E*>(workspace), static_cast<E*>(workspace) + buffer};
  const std::int64_t blocks = (params.D + kWarps - 1) / kWarps * ((params.B + kRows - 1) / kRows) * params.N * params.H;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  launch_start<E>(t, StepFor<kCell>::S, h[0], nullptr, 0, stream);
  for (int s = 0; s < t.T; ++s) {
    step<kCell, kType, kRows><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(t, s, h[s % 2], h[(s + 1) % 2]);
  }
  return cudaPeekAtLastError();
}

template <Cell kCell, DType kType>
cudaError_t run(const Params& params, void* workspace, cudaStream_t stream) {
  return params.B == 1 ? run<kCell, kType, 1>(params, workspace, stream)
                       : run<kCell, kType, 8>(params, workspace, stream);
}

template <Cell kCell>
cudaError_t run(const Params& params, void* workspace, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat32:
      return run<kCell, DType::kFloat32>(params, workspace, stream);
    case DType::kFloat16:
      return run<kCell, DType::kFloat16>(params, workspace, stream);
    case DType::kBfloat16:
      return run<kCell, DType::kBfloat16>(params, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_plain(const Params& params, void* workspace, cudaStream_t stream) {
  switch (params.cell) {
    case Cell::kLstm:
      return run<Cell::kLstm>(params, workspace, stream);
    case Cell::kGru:
      return run<Cell::kGru>(params, workspace, stream);
    case Cell::kElman:
      return run<Cell::kElman>(params, workspace, stream);
    case Cell::kSlstm:
      return run<Cell::kSlstm>(params, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashrnn::cuda
