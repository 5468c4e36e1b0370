// The table of this build's kernels and the choice among them.
#include <atomic>

#include "alternating.h"
#include "kernel.h"
#include "launch.h"

namespace flashrnn::cuda {
namespace {

#define FLASHRNN_KERNEL(cell, dtype, capability, min_batch, max_batch, clips, mode, D, CL, UB, BT, ...)    \
  {Cell::cell,                                                                                             \
   DType::dtype,                                                                                           \
   capability,                                                                                             \
   min_batch,                                                                                              \
   max_batch,                                                                                              \
   clips != 0,                                                                                             \
   Mode::mode,                                                                                             \
   D,                                                                                                      \
   CL,                                                                                                     \
   UB,                                                                                                     \
   BT,                                                                                                     \
   &Kernel<Config<Cell::cell, DType::dtype, clips != 0, Mode::mode, D, CL, UB, BT, __VA_ARGS__>>::prepare, \
   &Kernel<Config<Cell::cell, DType::dtype, clips != 0, Mode::mode, D, CL, UB, BT, __VA_ARGS__>>::launch},
constexpr KernelRow kTable[] = {
#include "kernel_configs.inc"
    {Cell::kLstm, DType::kFloat32, 0, 0, 0, false, Mode::kLocal, 0, 0, 0, 0, nullptr, nullptr},  // the end
};
#undef FLASHRNN_KERNEL
constexpr int kRows = static_cast<int>(sizeof(kTable) / sizeof(kTable[0])) - 1;

// What prepare() said, by device and row: 0 not asked yet, 1 fits, 2 does not.
constexpr int kDevices = 32;
std::atomic<signed char> prepared[kDevices][kRows + 1];

bool is_ready(int device, int index) {
  std::atomic<signed char>* const known = device < kDevices ? &prepared[device][index] : nullptr;
  if (known != nullptr && known->load(std::memory_order_acquire) != 0) return known->load() == 1;
  int resident = 0;
  const bool fits = kTable[index].prepare(resident) == cudaSuccess && resident > 0;
  if (!fits) (void)cudaGetLastError();  // the question failed, the launch need not
  if (known != nullptr) known->store(fits ? 1 : 2, std::memory_order_release);
  return fits;
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
    if (is_ready(device, i)) best = i;
  }
  return best;
}

cudaError_t launch_row(int index, const Params& p, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(p)) return cudaErrorInvalidValue;
  if (p.B == 0) return cudaSuccess;
  if (index == kNone) return launch_alternating(p, workspace, stream);
  int device = 0, capability = 0;
  if (!current_device(device, capability) || !serves(kTable[index], p, capability) || !is_ready(device, index)) {
    return cudaErrorInvalidConfiguration;
  }
  return kTable[index].launch(tensors_of(p, kSpinLimit), stream);
}

bool is_specialised(const Params& p) { return choose_kernel(p) != kNone; }

std::size_t workspace_bytes(const Params& p) {
  if (!sizes_fit(p) || p.B == 0 || choose_kernel(p) != kNone) return 0;
  return alternating_workspace_bytes(p);
}

std::size_t max_workspace_bytes(const Params& p) { return sizes_fit(p) ? alternating_workspace_bytes(p) : 0; }

cudaError_t launch(const Params& p, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(p)) return cudaErrorInvalidValue;
  return launch_row(choose_kernel(p), p, workspace, stream);
}

}  // namespace flashrnn::cuda
