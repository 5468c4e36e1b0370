#include "shapes.h"

#include <algorithm>
#include <cstdlib>

#include "error.h"

namespace flashrnn_edge {
namespace {

constexpr std::int64_t kMaxElements = 0x7fffffff;  // of one tensor (TensorRT's developer guide)

// "1x1x64:100x4x64:512x16x64"; one shape alone is all three.
std::vector<Dims> parse_range(const std::string& option, const std::string& text) {
  std::vector<Dims> shapes(1);
  for (const char* at = text.c_str();;) {
    char* end = nullptr;
    shapes.back().push_back(std::strtoll(at, &end, 10));
    const bool good =
        end != at && shapes.back().back() >= 0 && (*end == 'x' || *end == ',' || *end == ':' || *end == '\0');
    if (!good) fail("--shape ", option, ": write it as NAME=MIN:OPT:MAX, for example x=1x1x64:100x4x64:512x16x64");
    if (*end == '\0') break;
    if (*end == ':') shapes.emplace_back();
    at = end + 1;
  }
  if (shapes.size() == 1) shapes.resize(3, shapes[0]);
  if (shapes.size() != 3) fail("--shape ", option, ": give one shape, or MIN:OPT:MAX");
  if (shapes[0].size() != shapes[1].size() || shapes[1].size() != shapes[2].size())
    fail("--shape ", option, ": its shapes have different numbers of axes");
  for (std::size_t axis = 0; axis < shapes[0].size(); ++axis) {
    const std::int64_t least = shapes[0][axis], usual = shapes[1][axis], most = shapes[2][axis];
    if (least > usual || usual > most)
      fail("--shape ", option, ": ", least, ":", usual, ":", most, " is not MIN:OPT:MAX in rising order");
  }
  return shapes;
}

struct Given {
  std::string name;
  std::vector<Dims> shapes;
};

Given parse_option(const std::string& option) {
  const std::size_t equals = option.rfind('=');
  if (equals == std::string::npos || equals == 0) fail("--shape ", option, ": write it as NAME=MIN:OPT:MAX");
  return {option.substr(0, equals), parse_range(option, option.substr(equals + 1))};
}

void check_names(const OnnxFile& file, const std::vector<std::string>& options) {
  for (const std::string& option : options) {
    const auto [name, shapes] = parse_option(option);
    bool is_axis = false;
    std::string names;
    for (const auto& [input, axes] : file.inputs) {
      is_axis = is_axis || std::find(axes.begin(), axes.end(), name) != axes.end();
      names += (names.empty() ? "" : ", ") + input;
    }
    if (file.inputs.count(name) != 0) continue;
    if (!is_axis) fail("--shape ", option, ": the model has no input or axis of this name; its inputs are ", names);
    if (shapes[0].size() != 1)
      fail("--shape ", option, ": ", name, " is an axis and has one size: ", name, "=1:100:512");
  }
}

}  // namespace

std::vector<Dims> profile_of(const std::string& input, const Dims& dims, const OnnxFile& file,
                             const std::vector<std::string>& options) {
  std::vector<Dims> shapes(3, dims);
  const auto found = file.inputs.find(input);
  const auto axis_name = [&](std::size_t axis) {
    return found != file.inputs.end() && axis < found->second.size() ? found->second[axis] : std::string();
  };
  for (const std::string& option : options) {
    const auto [name, given] = parse_option(option);
    for (std::size_t i = 0; i < 3; ++i) {
      if (name == input) {
        bool fits = given[i].size() == dims.size();
        for (std::size_t axis = 0; fits && axis < dims.size(); ++axis)
          fits = dims[axis] < 0 || dims[axis] == given[i][axis];
        if (!fits) fail("--shape ", option, ": ", text(given[i]), " does not fit the model's ", input, " ", text(dims));
      }
      for (std::size_t axis = 0; axis < dims.size(); ++axis) {
        const bool meant = name == input || (file.inputs.count(name) == 0 && axis_name(axis) == name);
        if (!meant || dims[axis] >= 0) continue;
        const std::int64_t size = name == input ? given[i][axis] : given[i].at(0);
        std::int64_t& known = shapes[i][axis];
        if (known >= 0 && known != size)
          fail("--shape ", option, ": another --shape gives the axis ", axis, " of ", input, " the size ", known);
        known = size;
      }
    }
  }
  for (std::size_t axis = 0; axis < dims.size(); ++axis) {
    if (shapes[0][axis] >= 0) continue;
    fail("axis ", axis, " of the input ", input, " ", text(dims), " has no size: give --shape ",
         axis_name(axis).empty() ? input + "=MIN:OPT:MAX" : axis_name(axis) + "=1:100:512");
  }
  std::int64_t elements = 1;
  for (const std::int64_t size : shapes[2]) {
    if (size > 0 && elements > kMaxElements / size) {
      fail("the largest shape ", text(shapes[2]), " of the input ", input, " has more than ", kMaxElements,
           " elements, and no tensor of TensorRT has: give a smaller --shape");
    }
    elements *= size;
  }
  return shapes;
}

void check_shapes(const OnnxFile& file, const std::vector<std::string>& options) {
  check_names(file, options);
  for (const auto& [input, dims] : file.input_dims) {
    const bool constant = file.initializers.count(input) != 0;  // of files before IR version 4
    if (!constant && !dims.empty()) (void)profile_of(input, dims, file, options);
  }
}

}  // namespace flashrnn_edge
