// Drives a plugin library through its whole life, without TensorRT: host LIBRARY; on a GPU also host LIBRARY time
#include <cstdio>
#include <cstring>

#include "checks.h"

int main(int argc, char** argv) {
  bool time = false;
#ifdef FLASHRNN_HOST_CUDA
  time = argc == 3 && std::strcmp(argv[2], "time") == 0;
#endif
  if (argc != 2 && !time) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  const auto library = host::load(argv[1]);
#ifdef FLASHRNN_HOST_CUDA
  if (time) {
    host::print_times(*library);
    return 0;
  }
#endif
  host::check_creators(*library);
  host::check_fields(*library);
  host::check_shapes(*library);
  host::check_formats(*library);
  host::check_serialization(*library);
  host::check_calls(*library);
  host::check_contexts(*library);
  std::printf("%s: %d checks, %d failed\n", library->name(), host::checks(), host::failures());
  return host::failures() == 0 ? 0 : 1;
}
