// Times kernels on GPU 0: `build-plugins --autotune` compiles this with its candidates and talks to it line by line.
//
// A line on stdin is a job, one call of the op and rows of the kernel table (-1: the alternating kernel), as numbers:
//
//   cell dtype T B N H D layout reverse clip relu normalizer_floor tolerance row...
//
// Each row's outputs are compared with those of the alternating kernel on the same inputs; rows within the tolerance
// take turns then, so that a change of the clock hits all alike. Lines on stdout, each flushed:
//
//   begin ROW          is about to run (what is said last before a hang or a crash names the kernel)
//   failed ROW TEXT    does not launch
//   error ROW VALUE    largest difference relative to max(1, largest expected value)
//   us ROW VALUE       microseconds per step: the median launch between CUDA events, over T
//   done               with the job
//
// An error that breaks the CUDA context ends the program with status 1.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <vector>

#include "../kernels/cuda/kernel.h"
#include "../kernels/cuda/launch.h"
#include "data.cuh"

namespace flashrnn::timer {
namespace {

constexpr int kRounds = 15;
constexpr double kWarmUpSeconds = 0.03;  // until the clock is up

struct Job {
  Params params;
  float tolerance = 0.0f;
  std::vector<int> rows;
};

bool read(const std::string& line, Job& job) {
  std::istringstream in(line);
  int cell = 0, dtype = 0;
  Params& p = job.params;
  in >> cell >> dtype >> p.T >> p.B >> p.N >> p.H >> p.D >> p.attributes.layout >> p.attributes.reverse >>
      p.attributes.clip >> p.attributes.relu >> p.attributes.normalizer_floor >> job.tolerance;
  if (!in) return false;
  p.cell = static_cast<Cell>(cell);
  p.dtype = static_cast<DType>(dtype);
  for (int row = 0; in >> row;) job.rows.push_back(row);
  return in.eof() && std::all_of(job.rows.begin(), job.rows.end(), [](int r) { return r < cuda::num_kernels(); });
}

template <class... Parts>
void say(const Parts&... parts) {
  (std::cout << ... << parts) << std::endl;
}

struct Outputs {
  Buffer y, final_states;
};

// The tensors of one job on the device.
class Call {
 public:
  explicit Call(const Params& given)
      : params_(given),
        states_(static_cast<std::size_t>(given.N * given.B * given.H * given.D)),
        elements_(static_cast<std::size_t>(given.T) * states_),
        element_bytes_(static_cast<std::size_t>(element_bytes(given.dtype))),
        gates_(static_cast<std::size_t>(num_gates(given.cell))),
        wx_(elements_ * gates_ * element_bytes_),
        r_(weights() * element_bytes_),
        b_(biases() * sizeof(float)),
        lens_(sizeof(std::int32_t)),
        initial_(num_states() * states_ * sizeof(float)),
        workspace_bytes_(cuda::max_workspace_bytes(given)),
        workspace_(workspace_bytes_) {
    Params& p = params_;
    p.wx = wx_.get();
    p.r = r_.get();
    p.b = b_.floats();
    p.sequence_lens = static_cast<const std::int32_t*>(lens_.get());
    p.num_lens = 1;
    p.initial_states = initial_.floats();
    const std::int32_t full = INT32_MAX;
    check(cudaMemcpy(lens_.get(), &full, sizeof(full), cudaMemcpyHostToDevice));
    fill(wx_.get(), p.dtype, elements_ * gates_, 1.0f, 1);
    // ReLU grows without bound from larger weights.
    const float deviation = (p.attributes.relu != 0 ? 0.5f : 1.0f) / std::sqrt(static_cast<float>(p.D));
    fill(r_.get(), p.dtype, weights(), deviation, 2);
    fill(b_.get(), DType::kFloat32, biases(), 0.5f, 3);
    fill(initial_.get(), DType::kFloat32, num_states() * states_, 0.5f, 4);
    if (p.cell == Cell::kSlstm) make_normalizer<<<kBlocks, kThreads>>>(initial_.floats() + 2 * states_, states_);
    check(cudaDeviceSynchronize());
  }

  cudaError_t launch(int row, const Outputs& out) {
    Params p = params_;
    p.y = out.y.get();
    p.final_states = out.final_states.floats();
    return cuda::launch_row(row, p, workspace_.get(), nullptr);
  }
  void poison_workspace() { workspace_.poison(); }

  // y and each state apart.
  float error(const Outputs& actual, const Outputs& expected) const {
    float worst = error_of(actual.y.get(), expected.y.get(), params_.dtype, elements_);
    for (std::size_t s = 0; s < num_states() && !std::isnan(worst); ++s) {
      const float* const a = actual.final_states.floats() + s * states_;
      const float* const b = expected.final_states.floats() + s * states_;
      const float one = error_of(a, b, DType::kFloat32, states_);
      if (!(one <= worst)) worst = one;
    }
    return worst;
  }

  std::size_t y_bytes() const { return elements_ * element_bytes_; }
  std::size_t final_bytes() const { return num_states() * states_ * sizeof(float); }

 private:
  std::size_t num_states() const { return static_cast<std::size_t>(flashrnn::num_states(params_.cell)); }
  std::size_t weights() const {
    return gates_ * static_cast<std::size_t>(params_.N * params_.H * params_.D * params_.D);
  }
  std::size_t biases() const {
    return static_cast<std::size_t>(num_biases(params_.cell) * params_.N * params_.H * params_.D);
  }

  Params params_;
  std::size_t states_, elements_, element_bytes_, gates_;
  Buffer wx_, r_, b_, lens_, initial_;
  std::size_t workspace_bytes_;
  Buffer workspace_;
};

// Whether a row launches and agrees with what is expected.
bool agrees(Call& call, int row, const Outputs& expected, Outputs& out, float tolerance) {
  out.y.poison();
  out.final_states.poison();
  call.poison_workspace();
  say("begin ", row);
  if (const cudaError_t error = call.launch(row, out)) {
    say("failed ", row, ' ', cudaGetErrorString(error));
    return false;
  }
  if (const cudaError_t error = cudaDeviceSynchronize()) {
    say("failed ", row, ' ', cudaGetErrorString(error));
    throw std::runtime_error("the context is lost");
  }
  const float error = call.error(out, expected);
  say("error ", row, ' ', error);
  return error <= tolerance;  // false for NaN
}

class Clock {
 public:
  Clock() {
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
  }
  ~Clock() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  float milliseconds(Call& call, int row, Outputs& out) {
    float time = 0.0f;
    check(cudaEventRecord(begin_));
    check(call.launch(row, out));
    check(cudaEventRecord(end_));
    check(cudaEventSynchronize(end_));
    check(cudaEventElapsedTime(&time, begin_, end_));
    return time;
  }

 private:
  cudaEvent_t begin_, end_;
};

void run(const Job& job) {
  Call call(job.params);
  Outputs expected{Buffer(call.y_bytes()), Buffer(call.final_bytes())};
  Outputs out{Buffer(call.y_bytes()), Buffer(call.final_bytes())};
  check(call.launch(cuda::kNone, expected));
  check(cudaDeviceSynchronize());
  std::vector<int> rows;
  for (const int row : job.rows) {
    if (agrees(call, row, expected, out, job.tolerance)) rows.push_back(row);
  }
  Clock clock;
  const auto round = [&](std::vector<std::vector<float>>& times) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      say("begin ", rows[i]);
      times[i].push_back(clock.milliseconds(call, rows[i], out));
    }
  };
  std::vector<std::vector<float>> times(rows.size()), unused(rows.size());
  const auto start = std::chrono::steady_clock::now();
  do {
    round(unused);
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < kWarmUpSeconds &&
           !rows.empty());
  for (int i = 0; i < kRounds; ++i) round(times);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::nth_element(times[i].begin(), times[i].begin() + kRounds / 2, times[i].end());
    say("us ", rows[i], ' ', times[i][kRounds / 2] * 1000.0f / static_cast<float>(job.params.T));
  }
}

}  // namespace
}  // namespace flashrnn::timer

int main() {
  try {
    for (std::string line; std::getline(std::cin, line);) {
      flashrnn::timer::Job job;
      if (!flashrnn::timer::read(line, job)) throw std::runtime_error("this is no job: " + line);
      flashrnn::timer::run(job);
      flashrnn::timer::say("done");
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
