// The table of this build's kernels and the choice among them.
#include <atomic>

#include "alternating.h"
#include "kernel.h"
#include "launch.h"

namespace flashrnn::cuda {
namespace {

#define FLASHRNN_KERNEL(cell, dtype, capability, min_batch, max_batch, clips, mode, D, CL, UB, BT, ...)            \
  {Cell::cell,                                                                                                     \
   DType::dtype,                                                                                                   \
   capability,                                                                                                     \
   min_batch,                                                                                                      \
   max_batch,                                                                                                      \
   clips != 0,                                                                                                     \
   Mode::mode,                                                                                                     \
   D,                                                                                                              \
   CL,                                                                                                             \
   UB,                                                                                                             \
   BT,                                                                                                             \
   &Kernel<Config<Cell::cell, DType::dtype, clips != 0, Mode::mode, D, CL, UB, BT, __VA_ARGS__>>::prepare,         \
   &Kernel<Config<Cell::cell, DType::dtype, clips != 0, Mode::mode, D, CL, UB, BT, __VA_ARGS__>>::workspace_bytes, \
   &Kernel<Config<Cell::cell, DType::dtype, clips != 0, Mode::mode, D, CL, UB, BT, __VA_ARGS__>>::launch},
constexpr KernelRow kTable[] = {
#include "kernel_configs.inc"
    {Cell::kLstm, DType::kFloat32, 0, 0, 0, false, Mode::kLocal, 0, 0, 0, 0, nullptr, nullptr, nullptr},  // the end
};
#undef FLASHRNN_KERNEL
constexpr int kRows = static_cast<int>(sizeof(kTable) / sizeof(kTable[0])) - 1;

// What prepare() said, by device and row: how many are resident, 0 not asked yet, kNone none.
constexpr int kDevices = 32;
std::atomic<int> prepared[kDevices][kRows + 1];

// How many heads' tiles of a row the device holds at once; at most 0 where none.
int residents(int device, int index) {
  std::atomic<int>* const known = device < kDevices ? &prepared[device][index] : nullptr;
  if (known != nullptr && known->load(std::memory_order_acquire) != 0) return known->load();
  int count = 0;
  if (kTable[index].prepare(count) != cudaSuccess || count <= 0) {
    (void)cudaGetLastError();  // the question failed, the launch need not
    count = kNone;
  }
  if (known != nullptr) known->store(count, std::memory_order_release);
  return count;
}

bool current_device(int& device, int& capability) {
  int major = 0, minor = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  capability = 10 * major + minor;
  return known;
}

bool serves(const KernelRow& row, const Params& p, int capability) {
  return row.cell == p.cell && row.dtype == p.dtype && row.compute_capability == capability &&
         row.clips == (p.attributes.clip > 0.0f) && p.D <= row.head_dim;
}

// No grid kernel of any build needs more.
std::size_t most_grid_workspace_bytes(const Params& p) {
  const std::int64_t most = p.N * p.H * p.B * kLargestGridHead;
  return static_cast<std::size_t>(most < kLargestGridUnits ? most : kLargestGridUnits) * kGridBytesPerUnit;
}

}  // namespace

int num_kernels() { return kRows; }
const KernelRow& kernel_row(int index) { return kTable[index]; }

int choose_kernel(const Params& p) {
  int device = 0, capability = 0, best = kNone;
  if (!current_device(device, capability)) return kNone;
  for (int i = 0; kTable[i].launch != nullptr; ++i) {
    const KernelRow& row = kTable[i];
    if (!serves(row, p, capability) || p.B < row.min_batch || p.B > row.max_batch) continue;
    if (best != kNone && kTable[best].head_dim <= row.head_dim) continue;
    if (residents(device, i) > 0) best = i;
  }
  return best;
}

cudaError_t launch_row(int index, const Params& p, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(p)) return cudaErrorInvalidValue;
  if (p.B == 0) return cudaSuccess;
  if (index == kNone) return launch_alternating(p, workspace, stream);
  int device = 0, capability = 0;
  if (!current_device(device, capability) || !serves(kTable[index], p, capability)) {
    return cudaErrorInvalidConfiguration;
  }
  const int resident = residents(device, index);
  if (resident <= 0) return cudaErrorInvalidConfiguration;
  Tensors t = tensors_of(p, kSpinLimit);
  if (kTable[index].workspace_bytes(t) > 0) {
    if (workspace == nullptr || !is_aligned(workspace, 16)) return cudaErrorInvalidValue;
    t.workspace = workspace;
  }
  return kTable[index].launch(t, resident, stream);
}

bool is_specialised(const Params& p) { return choose_kernel(p) != kNone; }

std::size_t workspace_bytes(const Params& p) {
  if (!sizes_fit(p) || p.B == 0) return 0;
  const int index = choose_kernel(p);
  return index == kNone ? alternating_workspace_bytes(p) : kTable[index].workspace_bytes(tensors_of(p, 0));
}

std::size_t max_workspace_bytes(const Params& p) {
  if (!sizes_fit(p)) return 0;
  const std::size_t grid = most_grid_workspace_bytes(p), alternating = alternating_workspace_bytes(p);
  return grid > alternating ? grid : alternating;
}

cudaError_t launch(const Params& p, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(p)) return cudaErrorInvalidValue;
  return launch_row(choose_kernel(p), p, workspace, stream);
}

}  // namespace flashrnn::cuda
