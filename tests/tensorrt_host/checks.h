// What a plugin library has to do, as checks that print a line each.
#pragma once

#include "driver.h"

namespace host {

// Prints "ok WHAT" or "FAILED WHAT" and counts.
void check(bool good, const std::string& what);
int failures();
int checks();

void check_creators(Library& library);
void check_fields(Library& library);
void check_shapes(Library& library);
void check_formats(Library& library);
void check_serialization(Library& library);
void check_calls(Library& library);
void check_contexts(Library& library);  // eight of one layer, on eight threads and streams at once

void print_times(Library& library);  // with FLASHRNN_HOST_CUDA

}  // namespace host
