// The --shape options: smallest, usual and largest shape of each input.
#pragma once

#include <string>
#include <vector>

#include "onnx_file.h"

namespace flashrnn_edge {

// What can be said before TensorRT reads the model. Throws Error: an option cannot be read, names nothing or
// contradicts another, or an axis has no size.
void check_shapes(const OnnxFile& file, const std::vector<std::string>& options);

// The three shapes of an input, whose axes of size -1 the options give. Throws Error.
std::vector<Dims> profile_of(const std::string& input, const Dims& dims, const OnnxFile& file,
                             const std::vector<std::string>& options);

}  // namespace flashrnn_edge
