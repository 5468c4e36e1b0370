#include "shape_inference.h"

#include <atomic>
#include <string>
#include <vector>

#include "status.h"
#include "tensors.h"

namespace flashrnn::ort {
namespace {

// A shape in which unknown dims are -1; those with a name carry it.
struct SymbolicShape {
  ElementType type;
  Dims dims;
  std::vector<std::string> names;
};

SymbolicShape input_shape(const OrtApi& api, OrtShapeInferContext* context, Input index) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.ShapeInferContext_GetInputTypeShape(context, index, &info));  // the context keeps `info`
  SymbolicShape shape{kUndefined, dims_of(api, info), {}};
  check(api, api.GetTensorElementType(info, &shape.type));
  std::vector<const char*> names(shape.dims.size(), "");
  check(api, api.GetSymbolicDimensions(info, names.data(), names.size()));
  shape.names.assign(names.begin(), names.end());
  return shape;
}

// A dim without a name would become the size -1, which data propagation carries into a Reshape behind the op. Two dims
// of one name would be equal sizes.
std::string unknown_name() {
  static std::atomic<unsigned> count{0};
  return "flashrnn_unknown_" + std::to_string(count++);
}

void set_output(const OrtApi& api, OrtShapeInferContext* context, Output index, const SymbolicShape& shape) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.CreateTensorTypeAndShapeInfo(&info));
  const struct Release {
    const OrtApi& api;
    OrtTensorTypeAndShapeInfo* info;
    ~Release() { api.ReleaseTensorTypeAndShapeInfo(info); }
  } release{api, info};
  std::vector<std::string> fresh(shape.names);
  std::vector<const char*> names;
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    if (shape.dims[i] < 0 && fresh[i].empty()) fresh[i] = unknown_name();
    names.push_back(fresh[i].c_str());
  }
  check(api, api.SetTensorElementType(info, shape.type));
  check(api, api.SetDimensions(info, shape.dims.data(), shape.dims.size()));
  check(api, api.SetSymbolicDimensions(info, names.data(), names.size()));
  check(api, api.ShapeInferContext_SetOutputTypeShape(context, index, info));
}

}  // namespace

// The runtime calls the function of whichever dtype was registered first: y's type is read from wx, not from the op.
// A rank of 0 is how a runtime reports an input of unknown rank: nothing is said about an output that depends on it.
void infer_shapes(const OrtApi& api, OrtShapeInferContext* context, Cell cell) {
  const char* label = info(cell).op_type;
  const SymbolicShape wx = input_shape(api, context, kWx), r = input_shape(api, context, kR);
  const SymbolicShape states = input_shape(api, context, kInitialStates);
  const struct {
    const SymbolicShape& shape;
    const char* name;
    std::size_t rank;
  } expected[] = {{wx, "wx", 3}, {r, "r", 5}, {states, "initial_states", 4}};
  for (const auto& [shape, name, rank] : expected) {
    const std::size_t got = shape.dims.size();
    if (got != 0 && got != rank) {
      refuse(label, ": ", name, " has shape ", text(shape_of(shape.dims)), ", expected rank ", rank);
    }
  }
  if (!wx.dims.empty()) {
    SymbolicShape y = wx;
    const bool known = !r.dims.empty() && r.dims[0] > 0 && r.dims[2] > 0 && r.dims[3] > 0;
    y.dims[2] = known ? r.dims[0] * r.dims[2] * r.dims[3] : -1;
    y.names[2].clear();
    set_output(api, context, kY, y);
  }
  if (!states.dims.empty()) set_output(api, context, kFinalStates, states);
}

}  // namespace flashrnn::ort
