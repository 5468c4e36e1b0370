#include "array.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "error.h"
#include "files.h"

namespace flashrnn_edge {
namespace {

struct TypeInfo {
  Type type;
  const char* name;
  std::size_t size;
  const char* npy;  // its type in a .npy file
};
constexpr TypeInfo kTypes[] = {
    {Type::kFloat32, "float32", 4, "<f4"},     {Type::kFloat16, "float16", 2, "<f2"},
    {Type::kBfloat16, "bfloat16", 2, nullptr}, {Type::kInt32, "int32", 4, "<i4"},
    {Type::kInt64, "int64", 8, "<i8"},         {Type::kBool, "bool", 1, "|b1"},
};
const TypeInfo& info(Type type) { return kTypes[static_cast<int>(type)]; }

float from_half(std::uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float sign = (half & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
}

std::uint16_t to_half(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size == 0.0f) return sign;
  if (size >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00);
  int exponent = 0;
  (void)std::frexp(size, &exponent);              // size = f 2^exponent, f in [0.5, 1)
  const int unit = std::max(exponent, -13) - 11;  // the weight of the last bit; subnormals share the smallest
  const int rounded =
      static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));  // its leading one adds to the exponent
  return static_cast<std::uint16_t>(sign | (((unit + 24) << 10) + rounded));
}

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <class T>
void store(char* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

bool is_float(Type type) { return type == Type::kFloat32 || type == Type::kFloat16 || type == Type::kBfloat16; }

float load_float(Type type, const char* at) {
  if (type == Type::kFloat32) return load<float>(at);
  const auto bits = load<std::uint16_t>(at);
  if (type == Type::kFloat16) return from_half(bits);
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  return load<float>(reinterpret_cast<const char*>(&wide));
}

void store_float(Type type, char* at, float value) {
  if (type == Type::kFloat32) return store(at, value);
  if (type == Type::kFloat16) return store(at, to_half(value));
  auto bits = load<std::uint32_t>(reinterpret_cast<const char*>(&value));
  bits = std::isnan(value) ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
  store(at, static_cast<std::uint16_t>(bits >> 16));
}

std::int64_t load_int(Type type, const char* at) {
  if (type == Type::kInt64) return load<std::int64_t>(at);
  return type == Type::kInt32 ? load<std::int32_t>(at) : *at;
}

// The text behind 'key': in the header's Python dictionary.
std::string entry(const std::string& header, const std::string& key, const std::string& path) {
  const std::size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) fail(path, " is not a .npy file: its header has no ", key);
  return header.substr(header.find_first_not_of(' ', at + key.size() + 3));
}

}  // namespace

const char* name(Type type) { return info(type).name; }
std::size_t size_of(Type type) { return info(type).size; }

std::int64_t num_elements(const Dims& dims) {
  std::int64_t count = 1;
  for (const std::int64_t dim : dims) count *= dim;
  return count;
}

std::string text(const Dims& dims) {
  std::string out;
  for (const std::int64_t dim : dims) out += (out.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + out + "]";
}

Array::Array(Type type_of_elements, Dims sizes)
    : type(type_of_elements),
      dims(std::move(sizes)),
      bytes(static_cast<std::size_t>(num_elements(dims)) * size_of(type)) {}

Array read_npy(const std::string& path) {
  const std::string file = read_file(path);
  if (file.size() < 12 || file.compare(0, 6, "\x93NUMPY") != 0) fail(path, " is not a .npy file");
  const bool old = file[6] == 1;
  const std::size_t start = old ? 10 : 12;
  const std::size_t length = old ? load<std::uint16_t>(&file[8]) : load<std::uint32_t>(&file[8]);
  if (file.size() < start + length) fail(path, " is not a whole .npy file");
  const std::string header = file.substr(start, length);
  if (entry(header, "fortran_order", path).compare(0, 5, "False") != 0)
    fail(path, " is in Fortran order; save it in C order");

  Dims dims;
  const std::string shape = entry(header, "shape", path);
  for (const char* at = shape.c_str() + 1; *at != ')' && *at != '\0';) {
    char* end = nullptr;
    const long long dim = std::strtoll(at, &end, 10);
    if (end == at || dim < 0) fail(path, " is not a .npy file: its shape is ", shape.substr(0, shape.find(')') + 1));
    dims.push_back(dim);
    at = end + std::strspn(end, ", ");
  }
  const std::string descr = entry(header, "descr", path);
  for (const TypeInfo& known : kTypes) {
    if (known.npy == nullptr || descr.compare(1, 3, known.npy) != 0) continue;
    Array array(known.type, dims);
    if (file.size() != start + length + array.bytes.size()) fail(path, " is not a whole .npy file");
    std::copy(file.begin() + static_cast<std::ptrdiff_t>(start + length), file.end(), array.bytes.begin());
    return array;
  }
  fail(path, " holds elements of type ", descr.substr(0, descr.find(',')),
       "; save float32, float16, int32, int64 or bool");
}

void write_npy(const std::string& path, const Array& array) {
  if (array.type == Type::kBfloat16) return write_npy(path, convert(array, Type::kFloat32, path));
  std::string shape;
  for (const std::int64_t dim : array.dims) shape += std::to_string(dim) + ", ";
  std::string header =
      std::string("{'descr': '") + info(array.type).npy + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize((10 + header.size()) / 64 * 64 + 64 - 10 - 1, ' ');  // the data start at a multiple of 64
  header += '\n';
  std::string file = std::string("\x93NUMPY\x01\x00", 8);
  file += static_cast<char>(header.size() & 0xff);
  file += static_cast<char>(header.size() >> 8);
  write_file(path, file + header + std::string(array.bytes.begin(), array.bytes.end()));
}

Array convert(const Array& array, Type type, const std::string& what) {
  if (array.type == type) return array;
  if (is_float(array.type) != is_float(type)) fail(what, " is ", name(array.type), ", expected ", name(type));
  Array out(type, array.dims);
  const std::size_t from = size_of(array.type), to = size_of(type);
  for (std::size_t i = 0; i * to < out.bytes.size(); ++i) {
    if (is_float(type)) {
      store_float(type, &out.bytes[i * to], load_float(array.type, &array.bytes[i * from]));
      continue;
    }
    const std::int64_t value = load_int(array.type, &array.bytes[i * from]);
    const std::int64_t most = type == Type::kInt64   ? std::numeric_limits<std::int64_t>::max()
                              : type == Type::kInt32 ? std::numeric_limits<std::int32_t>::max()
                                                     : 1;
    const std::int64_t least = type == Type::kBool ? 0 : -most - 1;
    if (value < least || value > most) fail(what, " holds ", value, ", which is no ", name(type));
    if (type == Type::kInt64) store(&out.bytes[i * to], value);
    if (type == Type::kInt32) store(&out.bytes[i * to], static_cast<std::int32_t>(value));
    if (type == Type::kBool) store(&out.bytes[i * to], static_cast<char>(value));
  }
  return out;
}

Array slice(const Array& array, std::size_t axis, std::int64_t start, std::int64_t stop) {
  Dims dims = array.dims;
  dims[axis] = stop - start;
  Array out(array.type, dims);
  const std::int64_t outer = num_elements(Dims(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(axis)));
  const std::int64_t inner = num_elements(Dims(dims.begin() + static_cast<std::ptrdiff_t>(axis) + 1, dims.end())) *
                             static_cast<std::int64_t>(size_of(array.type));
  for (std::int64_t i = 0; i < outer; ++i) {
    const auto from = array.bytes.begin() + (i * array.dims[axis] + start) * inner;
    std::copy(from, from + dims[axis] * inner, out.bytes.begin() + i * dims[axis] * inner);
  }
  return out;
}

Array concatenate(const std::vector<Array>& parts, std::size_t axis) {
  Dims dims = parts.front().dims;
  dims[axis] = 0;
  for (const Array& part : parts) dims[axis] += part.dims[axis];
  Array out(parts.front().type, dims);
  const std::int64_t outer = num_elements(Dims(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(axis)));
  const std::int64_t inner = num_elements(Dims(dims.begin() + static_cast<std::ptrdiff_t>(axis) + 1, dims.end())) *
                             static_cast<std::int64_t>(size_of(out.type));
  auto to = out.bytes.begin();
  for (std::int64_t i = 0; i < outer; ++i) {
    for (const Array& part : parts) {
      const std::int64_t count = part.dims[axis] * inner;
      to = std::copy(part.bytes.begin() + i * count, part.bytes.begin() + (i + 1) * count, to);
    }
  }
  return out;
}

}  // namespace flashrnn_edge
