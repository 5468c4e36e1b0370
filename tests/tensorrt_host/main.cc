// Drives a plugin library through its whole life, without TensorRT: host LIBRARY
#include <cstdio>

#include "checks.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  const auto library = host::load(argv[1]);
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
