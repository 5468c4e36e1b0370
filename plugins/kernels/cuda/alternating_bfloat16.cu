// The kernels of the alternating mode in bfloat16.
#include "alternating_launch.cuh"

template cudaError_t flashrnn::cuda::launch_all_steps<flashrnn::DType::kBfloat16>(const Params&, const Device&, void*,
                                                                                  cudaStream_t);
