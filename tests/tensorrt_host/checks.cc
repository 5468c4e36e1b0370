#include "checks.h"

#include <atomic>
#include <cstdio>

#include "problem.h"

namespace host {
namespace {

std::atomic<int> failed{0}, done{0};

using flashrnn::Cell;
using flashrnn::DType;

Problem problem_of(Cell cell) {
  Problem problem;
  problem.cell = cell;
  return problem;
}

}  // namespace

void check(bool good, const std::string& what) {
  ++done;
  if (!good) ++failed;
  std::printf("%s %s\n", good ? "ok" : "FAILED", what.c_str());
}
int failures() { return failed; }
int checks() { return done; }

void check_creators(Library& library) {
  std::vector<std::string> expected;
  for (const auto& op : flashrnn::kOps) expected.emplace_back(op.op_type);
  check(library.ops() == expected, "one creator for each op");
  for (const std::string& op : library.ops()) {
    check(library.version_and_namespace(op) == "1 ", op + " is of version 1, without a namespace");
    std::printf("fields %s", op.c_str());
    for (const std::string& name : library.fields(op)) std::printf(" %s", name.c_str());
    std::printf("\n");
  }
}

// Messages go to stderr, behind a line that says what is tried.
void check_fields(Library& library) {
  const auto refused = [&](const std::string& op, const std::vector<Field>& fields, const std::string& what) {
    std::fflush(stdout);
    std::fprintf(stderr, "trying: %s %s\n", op.c_str(), what.c_str());
    check(library.create(op, fields) == nullptr, op + " refuses " + what);
  };
  for (const auto& info : flashrnn::kOps) {
    const std::string op = info.op_type;
    const std::vector<Field> good = problem_of(info.cell).fields();
    check(library.create(op, good) != nullptr, op + " is created");
    for (std::size_t i = 0; i < good.size(); ++i) {
      std::vector<Field> fields = good;
      fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(i));
      refused(op, fields, "no " + good[i].name);
      fields = good;
      fields[i].length = 2;
      refused(op, fields, "two values of " + good[i].name);
      fields = good;
      fields[i].kind = good[i].kind == Field::kInt32 ? Field::kFloat32 : Field::kInt32;
      refused(op, fields, "another type of " + good[i].name);
      for (const double bad : {-1.0, good[i].kind == Field::kInt32 ? 2.0 : 1e39}) {
        fields = good;
        fields[i].value = bad;
        if (bad > 2) fields[i].kind = Field::kFloat64;
        refused(op, fields, good[i].name + " " + std::to_string(bad));
      }
      fields = good;
      fields[i].kind = good[i].kind == Field::kInt32 ? Field::kInt64 : Field::kFloat64;
      check(library.create(op, fields) != nullptr, op + " takes the wide type of " + good[i].name);
    }
    std::vector<Field> fields = good;
    fields.push_back({Field::kText, "plugin_version", 0, "1", 1});
    check(library.create(op, fields) != nullptr, op + " takes a text without a terminating zero");
    fields.push_back({Field::kInt32, "hidden_size", 4});
    refused(op, fields, "an unknown attribute");
  }
  Problem slstm = problem_of(Cell::kSlstm);
  slstm.attributes.clip = 1.0f;
  refused("FlashSLSTM", slstm.fields(), "a clip");
}

void check_shapes(Library& library) {
  for (const auto& info : flashrnn::kOps) {
    Problem problem = problem_of(info.cell);
    for (const int layout : {0, 1}) {
      problem.attributes.layout = layout;
      const auto layer = library.create(info.op_type, problem.fields());
      const std::string what = std::string(info.op_type) + " layout " + std::to_string(layout);
      std::vector<Dims> inputs, outputs;
      for (const Tensor& tensor : problem.inputs()) inputs.push_back(tensor.dims);
      check(layer->output_dims(inputs, outputs) && outputs[0] == problem.outputs()[0].dims &&
                outputs[1] == problem.outputs()[1].dims,
            what + ": dims of outputs");
      inputs[0][0] = inputs[0][1] = inputs[4][2] = -1;
      check(layer->output_dims(inputs, outputs) && outputs[0] == Dims{-1, -1, problem.H * problem.D} &&
                outputs[1] == Dims{num_states(info.cell), 1, -1, problem.H * problem.D},
            what + ": dims of outputs with T and B unknown");
      inputs[1].pop_back();
      check(!layer->output_dims(inputs, outputs), what + ": refuses a rank");

      std::vector<Tensor> largest = problem.inputs();
      check(layer->configure(largest), what + ": is configured");
      largest[2].dims[1] += 1;
      Result unused;
      if (library.name() == std::string("IPluginV3"))
        check(!layer->configure(largest), what + ": refuses a shape of b");
      check(!layer->enqueue(largest, problem.outputs(), std::vector<const void*>(5), std::vector<void*>(2), nullptr,
                            nullptr),
            what + ": does not run a wrong shape of b");
    }
  }
}

// All types of all tensors, one place at a time beside a good rest, and the format.
void check_formats(Library& library) {
  for (const auto& info : flashrnn::kOps) {
    const auto layer = library.create(info.op_type, problem_of(info.cell).fields());
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      Problem problem = problem_of(info.cell);
      problem.dtype = dtype;
      std::vector<Tensor> tensors = problem.inputs();
      for (const Tensor& output : problem.outputs()) tensors.push_back(output);
      const Type wx = tensors[0].type;
      const bool exists = dtype != DType::kBfloat16 || library.has_bfloat16();
      bool right = true;
      for (std::size_t place = 0; place < tensors.size(); ++place) {
        for (const Type type : {Type::kFloat32, Type::kFloat16, Type::kBfloat16, Type::kInt32, Type::kBool}) {
          std::vector<Tensor> changed = tensors;
          changed[place].type = type;
          const bool real =
              type == Type::kFloat32 || type == Type::kFloat16 || (type == Type::kBfloat16 && library.has_bfloat16());
          const bool tied = place == 1 || place == 5;
          const bool expected = place == 0 ? real : tied ? exists && type == wx : type == tensors[place].type;
          right = right && layer->supports(static_cast<int>(place), changed) == expected;
          changed[place].linear = false;
          right = right && !layer->supports(static_cast<int>(place), changed);
        }
      }
      std::vector<Type> types;
      for (const Tensor& tensor : problem.inputs()) types.push_back(tensor.type);
      if (exists) right = right && layer->output_types(types) == std::vector<Type>{wx, Type::kFloat32};
      check(right, "formats beside wx of " + problem.text());
    }
  }
}

void check_serialization(Library& library) {
  for (const auto& info : flashrnn::kOps) {
    const std::string op = info.op_type;
    Problem problem = problem_of(info.cell);
    const std::string plain = library.create(op, problem.fields())->serialize();
    for (const Field& field : problem.fields()) {
      std::vector<Field> fields = problem.fields();
      for (Field& f : fields) {
        const bool slstm_clip = field.name == "clip" && info.cell == Cell::kSlstm;
        if (f.name == field.name) f.value = slstm_clip ? 0.0 : 1.0;
      }
      const std::string bytes = library.create(op, fields)->serialize();
      const auto again = library.deserialize(op, bytes);
      const bool differs = field.name == "clip" && info.cell == Cell::kSlstm ? bytes == plain : bytes != plain;
      check(again != nullptr && again->serialize() == bytes && differs, op + " keeps " + field.name + " in an engine");
      const auto copy = again->for_context();
      check(copy != nullptr && copy->serialize() == bytes, op + " gives a context its " + field.name);
    }
    std::fflush(stdout);
    std::fprintf(stderr, "trying: %s damaged\n", op.c_str());
    check(library.deserialize(op, plain.substr(0, plain.size() / 2)) == nullptr, op + " refuses half its bytes");
    check(library.deserialize(op, "") == nullptr, op + " refuses no bytes");
    std::string flipped = plain;
    flipped[1] = static_cast<char>(flipped[1] ^ 0x40);
    check(library.deserialize(op, flipped) == nullptr, op + " refuses a flipped byte in front");
  }
}

}  // namespace host
