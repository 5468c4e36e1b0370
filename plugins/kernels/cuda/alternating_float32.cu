// The kernels of the alternating mode in float32.
#include "alternating_launch.cuh"

template cudaError_t flashrnn::cuda::launch_all_steps<flashrnn::DType::kFloat32>(const Params&, const Device&, void*,
                                                                                 cudaStream_t);
