#include "step.h"

namespace flashrnn::cpu {

const Isa& best_isa() {
#ifdef FLASHRNN_X86
  // The compiler's own check includes the operating system's support. Every processor with AVX2 has F16C.
  // A pointer: GCC 13 takes a reference from a lambda for one to a temporary, and -Werror stops the build.
  static const Isa* const best = []() -> const Isa* {
    __builtin_cpu_init();
    const bool avx2 = FLASHRNN_CPU_LEVEL >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = FLASHRNN_CPU_LEVEL >= 2 && avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return avx512 ? &kAvx512 : avx2 ? &kAvx2 : &kBaseline;
  }();
  return *best;
#else
  return kBaseline;
#endif
}

}  // namespace flashrnn::cpu
