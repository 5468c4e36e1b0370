// What every binding checks before it calls a kernel: attributes and shapes against the op's contract (docs/op.md).
//
// No function here allocates unless it refuses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/op.h"

namespace flashrnn {

// The caller's mistake: a tensor or attribute outside the contract.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

// A tensor's dims, which live elsewhere.
struct Shape {
  const std::int64_t* dims;
  std::size_t rank;

  std::int64_t operator[](std::size_t axis) const { return dims[axis]; }
};
std::string text(Shape shape);  // "[2, 3]"

// The value of an INT attribute, all of which are switches.
int switch_value(Cell cell, const char* name, std::int64_t value);
// The value of a FLOAT attribute, all of which are bounds: finite and not negative.
float bound_value(Cell cell, const char* name, double value);
// Rules that concern more than one attribute.
void check_attributes(Cell cell, const Attributes& attributes);

// Sets N, H and D of `params` from the dims of r.
void check_weight(Shape r, Params& params);

// Checks the dims of all inputs, by Input, against the attributes of `params` and each other; sets all its sizes.
void check_inputs(const Shape (&inputs)[kNumInputs], Params& params);

std::array<std::int64_t, 3> y_dims(const Params& params);
std::array<std::int64_t, 4> final_states_dims(const Params& params);

}  // namespace flashrnn
