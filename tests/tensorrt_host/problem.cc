#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "reference.h"

namespace host {
namespace {

using flashrnn::DType;

void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

// IEEE float16 of a normal value or 0, to nearest.
std::uint16_t to_half(float value) {
  int exponent = 0;
  const float fraction = std::frexp(std::fabs(value), &exponent);  // value = fraction 2^exponent, fraction from 0.5
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (fraction == 0.0f || exponent < -13) return sign;
  const int scaled = static_cast<int>(std::nearbyint(fraction * 2048.0f));  // 1024..2048: the leading one included
  return static_cast<std::uint16_t>(sign + ((exponent + 13) << 10) + scaled);
}

float from_half(std::uint16_t half) {
  const int exponent = (half >> 10) & 31, fraction = half & 1023;
  float value = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
  if (exponent == 31) value = fraction == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
  return (half & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float out = 0;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

Type type_of(DType dtype) {
  return dtype == DType::kFloat32 ? Type::kFloat32 : dtype == DType::kFloat16 ? Type::kFloat16 : Type::kBfloat16;
}

std::size_t bytes_of(const Tensor& tensor) {
  std::size_t bytes = tensor.type == Type::kFloat16 || tensor.type == Type::kBfloat16 ? 2 : 4;
  for (const std::int64_t dim : tensor.dims) bytes *= static_cast<std::size_t>(dim);
  return bytes;
}

Bytes random_floats(const Tensor& tensor, float scale, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-scale, scale);
  Bytes bytes(bytes_of(tensor));
  const std::size_t size = tensor.type == Type::kFloat32 ? 4 : 2;
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    const float value = uniform(random);
    const std::uint16_t half = tensor.type == Type::kFloat16 ? to_half(value) : to_bfloat16(value);
    std::memcpy(&bytes[at], size == 4 ? static_cast<const void*>(&value) : &half, size);
  }
  return bytes;
}

std::vector<float> to_floats(const Bytes& bytes, DType dtype) {
  std::vector<float> values;
  const std::size_t size = static_cast<std::size_t>(flashrnn::element_bytes(dtype));
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    float value = 0;
    std::uint16_t half = 0;
    if (dtype == DType::kFloat32) {
      std::memcpy(&value, &bytes[at], 4);
    } else {
      std::memcpy(&half, &bytes[at], 2);
      value = dtype == DType::kFloat16 ? from_half(half) : from_bfloat16(half);
    }
    values.push_back(value);
  }
  return values;
}

double error_of(const std::vector<float>& got, const std::vector<float>& expected, double eps) {
  double largest = 1.0, error = 0.0;
  for (const float value : expected) largest = std::max(largest, static_cast<double>(std::fabs(value)));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    error = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(error, difference);
  }
  return error / (4.0 * eps * largest);
}

struct DeviceBuffer {
  explicit DeviceBuffer(const Bytes& bytes) { upload(bytes); }
  explicit DeviceBuffer(std::size_t bytes, unsigned char fill) { upload(Bytes(bytes, fill)); }
  ~DeviceBuffer() { check_cuda(cudaFree(memory)); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void upload(const Bytes& bytes) {
    check_cuda(cudaMalloc(&memory, std::max<std::size_t>(bytes.size(), 1)));
    check_cuda(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  void* memory = nullptr;
};

}  // namespace

std::string Problem::text() const {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16"};
  std::ostringstream out;
  out << op().op_type << " " << kNames[static_cast<int>(dtype)] << " T" << T << " B" << B << " N" << N << " H" << H
      << " D" << D << (ragged ? " ragged" : "");
  flashrnn::for_each_attribute(cell, attributes, [&](const char* name, const auto& value) {
    if (value != 0) out << " " << name << " " << value;
  });
  return out.str();
}

std::vector<Field> Problem::fields() const {
  struct Write {
    std::vector<Field>& out;
    void operator()(const char* name, int value) { out.push_back({Field::kInt32, name, static_cast<double>(value)}); }
    void operator()(const char* name, float value) {
      out.push_back({Field::kFloat32, name, static_cast<double>(value)});
    }
  };
  std::vector<Field> out;
  flashrnn::for_each_attribute(cell, attributes, Write{out});
  return out;
}

std::vector<Tensor> Problem::inputs() const {
  const std::int64_t G = num_gates(cell), Gb = num_biases(cell), S = num_states(cell);
  const Dims wx = attributes.layout != 0 ? Dims{B, T, N * H * D * G} : Dims{T, B, N * H * D * G};
  return {{wx, type_of(dtype)},
          {{N, G, H, D, D}, type_of(dtype)},
          {{N, Gb, H, D}, Type::kFloat32},
          {{ragged ? B : 1}, Type::kInt32},
          {{S, N, B, H * D}, Type::kFloat32}};
}

std::vector<Tensor> Problem::outputs() const {
  const Dims y = attributes.layout != 0 ? Dims{B, T, N * H * D} : Dims{T, B, N * H * D};
  return {{y, type_of(dtype)}, inputs()[flashrnn::kInitialStates]};
}

flashrnn::Params Problem::params() const {
  flashrnn::Params params;
  params.cell = cell;
  params.dtype = dtype;
  params.attributes = attributes;
  params.T = T;
  params.B = B;
  params.N = N;
  params.H = H;
  params.D = D;
  params.num_lens = ragged ? B : 1;
  return params;
}

std::vector<Bytes> make_inputs(const Problem& problem, unsigned seed) {
  std::mt19937 random(seed);
  const std::vector<Tensor> inputs = problem.inputs();
  const float r_scale = 1.0f / std::sqrt(static_cast<float>(problem.D));
  const float scales[flashrnn::kNumInputs] = {1.5f, r_scale, 0.5f, 0.0f, 0.7f};
  std::vector<Bytes> out;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].type != Type::kInt32) {
      out.push_back(random_floats(inputs[i], scales[i], random));
      continue;
    }
    std::vector<std::int32_t> lens{std::numeric_limits<std::int32_t>::max()};
    if (problem.ragged) {
      lens.resize(static_cast<std::size_t>(problem.B));
      for (auto& len : lens) len = static_cast<std::int32_t>(random() % static_cast<unsigned>(problem.T + 3)) - 1;
    }
    const auto* first = reinterpret_cast<const unsigned char*>(lens.data());
    out.emplace_back(first, first + 4 * lens.size());
  }
  if (problem.cell == flashrnn::Cell::kSlstm) {  // a normalizer is not negative
    Bytes& states = out[flashrnn::kInitialStates];
    const std::size_t quarter = states.size() / 4;
    for (std::size_t at = 2 * quarter + 3; at < 3 * quarter; at += 4) states[at] &= 0x7f;
  }
  return out;
}

Result reference(const Problem& problem, const std::vector<Bytes>& inputs) {
  Result result{Bytes(bytes_of(problem.outputs()[0])), Bytes(bytes_of(problem.outputs()[1]))};
  flashrnn::Params params = problem.params();
  params.wx = inputs[flashrnn::kWx].data();
  params.r = inputs[flashrnn::kR].data();
  params.b = reinterpret_cast<const float*>(inputs[flashrnn::kB].data());
  params.sequence_lens = reinterpret_cast<const std::int32_t*>(inputs[flashrnn::kSequenceLens].data());
  params.initial_states = reinterpret_cast<const float*>(inputs[flashrnn::kInitialStates].data());
  params.y = result.y.data();
  params.final_states = reinterpret_cast<float*>(result.final_states.data());
  run_reference(params);
  return result;
}

bool run(Layer& layer, const Problem& problem, const std::vector<Bytes>& inputs, cudaStream_t stream, unsigned noise,
         Result& result) {
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const Bytes& input : inputs) {
    buffers.push_back(std::make_unique<DeviceBuffer>(input));
    in.push_back(buffers.back()->memory);
  }
  for (const Tensor& output : problem.outputs()) {
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes_of(output), static_cast<unsigned char>(0xff)));
    out.push_back(buffers.back()->memory);
  }
  std::mt19937 random(noise);
  Bytes garbage(layer.workspace_bytes(problem.inputs()));
  for (auto& byte : garbage) byte = static_cast<unsigned char>(random());
  const DeviceBuffer workspace(garbage);
  if (!layer.enqueue(problem.inputs(), problem.outputs(), in, out, workspace.memory, stream)) return false;
  check_cuda(cudaStreamSynchronize(stream));
  result.y.resize(bytes_of(problem.outputs()[0]));
  result.final_states.resize(bytes_of(problem.outputs()[1]));
  check_cuda(cudaMemcpy(result.y.data(), out[0], result.y.size(), cudaMemcpyDeviceToHost));
  check_cuda(cudaMemcpy(result.final_states.data(), out[1], result.final_states.size(), cudaMemcpyDeviceToHost));
  return true;
}

double error_of(const Problem& problem, const Result& result, const Result& expected) {
  constexpr double kEps[] = {0x1p-23, 0x1p-10, 0x1p-7};
  const double eps = kEps[static_cast<int>(problem.dtype)];
  const auto floats = [&](const Result& r) {
    std::vector<float> all = to_floats(r.y, problem.dtype);
    const std::vector<float> states = to_floats(r.final_states, DType::kFloat32);
    all.insert(all.end(), states.begin(), states.end());
    return all;
  };
  return error_of(floats(result), floats(expected), eps);
}

}  // namespace host
