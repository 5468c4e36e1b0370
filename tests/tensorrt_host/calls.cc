// Calls through the plugin against the CPU kernel.
#include <thread>

#include "checks.h"
#include "problem.h"

namespace host {
namespace {

using flashrnn::Cell;
using flashrnn::DType;

// A base case and rows that change one thing.
std::vector<Problem> problems(Cell cell, DType dtype) {
  Problem base;
  base.cell = cell;
  base.dtype = dtype;
  if (cell == Cell::kSlstm) base.attributes.normalizer_floor = 1.0f;
  std::vector<Problem> all{base};
  const auto add = [&](auto change) {
    all.push_back(base);
    change(all.back());
  };
  add([](Problem& p) { p.attributes.layout = 1; });
  add([](Problem& p) { p.attributes.reverse = 1; });
  add([](Problem& p) { p.N = 2; });
  add([](Problem& p) { p.ragged = true; });
  add([](Problem& p) { p.N = 2, p.ragged = true, p.attributes.layout = 1, p.B = 5; });
  add([](Problem& p) { p.B = 1; });
  add([](Problem& p) { p.T = 1, p.B = 16; });
  add([](Problem& p) { p.T = 0; });
  add([](Problem& p) { p.H = 1, p.D = 64, p.T = 20; });
  add([](Problem& p) { p.H = 1, p.D = 128, p.B = 2; });
  if (cell != Cell::kSlstm) add([](Problem& p) { p.attributes.clip = 0.4f; });
  if (cell == Cell::kElman) add([](Problem& p) { p.attributes.relu = 1; });
  if (cell == Cell::kSlstm) add([](Problem& p) { p.attributes.normalizer_floor = 0.0f; });
  return all;
}

std::unique_ptr<Layer> loaded(Library& library, const Problem& problem) {
  const auto built = library.create(problem.op().op_type, problem.fields());
  const auto engine = library.deserialize(problem.op().op_type, built->serialize());
  return engine->for_context();
}

}  // namespace

void check_calls(Library& library) {
  double worst = 0;
  for (const auto& info : flashrnn::kOps) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      if (dtype == DType::kBfloat16 && !library.has_bfloat16()) continue;
      unsigned seed = 0;
      for (const Problem& problem : problems(info.cell, dtype)) {
        const std::vector<Bytes> inputs = make_inputs(problem, ++seed);
        const auto layer = loaded(library, problem);
        Result result, again;
        const bool ran = run(*layer, problem, inputs, nullptr, seed, result) &&
                         run(*layer, problem, inputs, nullptr, seed + 1, again);
        const double error = ran ? error_of(problem, result, reference(problem, inputs)) : 1e9;
        worst = std::max(worst, error);
        std::ostringstream what;
        what << problem.text() << ": " << error << " of what is allowed";
        check(ran && error <= 1.0 && result == again, what.str());
      }
    }
  }
  std::printf("largest error: %.3f of what is allowed\n", worst);
}

void check_contexts(Library& library) {
  for (const auto& info : flashrnn::kOps) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      constexpr unsigned kContexts = 8, kRounds = 10;
      Problem problem;
      problem.cell = info.cell;
      problem.dtype = dtype;
      const auto built = library.create(info.op_type, problem.fields());
      std::vector<std::unique_ptr<Layer>> layers;
      std::vector<Result> alone(kContexts);
      for (unsigned i = 0; i < kContexts; ++i) {
        layers.push_back(built->for_context());
        run(*layers[i], problem, make_inputs(problem, i), nullptr, i, alone[i]);
      }
      std::vector<std::thread> threads;
      std::vector<int> equal(kContexts, 0);
      for (unsigned i = 0; i < kContexts; ++i) {
        threads.emplace_back([&, i] {
          cudaStream_t stream = nullptr;
          if (cudaStreamCreate(&stream) != cudaSuccess) return;
          for (unsigned round = 0; round < kRounds; ++round) {
            Result result;
            const bool ran = run(*layers[i], problem, make_inputs(problem, i), stream, 100 + i + round, result);
            equal[i] += ran && result == alone[i] ? 1 : 0;
          }
          if (cudaStreamDestroy(stream) != cudaSuccess) equal[i] = 0;
        });
      }
      for (std::thread& thread : threads) thread.join();
      check(equal == std::vector<int>(kContexts, kRounds), problem.text() + ": eight contexts at once, bitwise");
    }
  }
}

}  // namespace host
