// Arrays on the host, and .npy files of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashrnn_edge {

enum class Type { kFloat32, kFloat16, kBfloat16, kInt32, kInt64, kBool };
const char* name(Type type);  // "float32"
std::size_t size_of(Type type);

using Dims = std::vector<std::int64_t>;
std::int64_t num_elements(const Dims& dims);
std::string text(const Dims& dims);  // "[2, 3]"

struct Array {
  Type type = Type::kFloat32;
  Dims dims;
  std::vector<char> bytes;

  Array() = default;
  Array(Type type_of_elements, Dims sizes);  // zeros
};

// A C-ordered little-endian array of one of the types above (NumPy's NEP 1); bfloat16 is stored as float32. Throws
// Error.
Array read_npy(const std::string& path);
void write_npy(const std::string& path, const Array& array);

// The values in another type: between floats to nearest, between integers where they fit. Throws Error, which names
// `what`.
Array convert(const Array& array, Type type, const std::string& what);

Array slice(const Array& array, std::size_t axis, std::int64_t start, std::int64_t stop);
Array concatenate(const std::vector<Array>& parts, std::size_t axis);

}  // namespace flashrnn_edge
