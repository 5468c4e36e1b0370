// Engines on a GPU, through samples/cpp_edge: edge_check ENGINE LIB MODEL_FOLDER
//
// MODEL_FOLDER is of tests/gpu/tensorrt_cases.py. Runs its cases on one session in turn, whole and in chunks, plain and
// by a CUDA graph; a call beyond the profile, and the first case again; eight sessions on eight threads.
#include <dirent.h>

#include <cmath>
#include <cstdio>
#include <thread>

#include "error.h"
#include "files.h"
#include "flashrnn_edge.h"

namespace {

using namespace flashrnn_edge;

int failures = 0;
void check(bool good, const std::string& what) {
  failures += good ? 0 : 1;
  std::printf("%s %s\n", good ? "ok" : "FAILED", what.c_str());
}

Arrays read_folder(const std::string& folder) {
  Arrays arrays;
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) fail("there is no folder ", folder);
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name.size() > 4 && name.substr(name.size() - 4) == ".npy") {
      arrays[name.substr(0, name.size() - 4)] = read_npy(folder + "/" + name);
    }
  }
  closedir(entries);
  return arrays;
}

struct Case {
  Arrays inputs, expected;
};

// The largest error over what is allowed; NaN counts as infinite.
double error_of(const Arrays& got, const Arrays& expected, const Json& allowed) {
  double worst = 0;
  for (const auto& [name, want] : expected) {
    const Array have = convert(got.at(name), Type::kFloat32, name);
    if (have.dims != want.dims) fail(name, " has shape ", text(have.dims), ", expected ", text(want.dims));
    const auto* a = reinterpret_cast<const float*>(have.bytes.data());
    const auto* b = reinterpret_cast<const float*>(want.bytes.data());
    double error = 0;
    for (std::size_t i = 0; i < have.bytes.size() / 4; ++i) {
      const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    }
    worst = std::max(worst, error / allowed[name].number);
  }
  return worst;
}

bool equal(const Arrays& a, const Arrays& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, array] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.bytes != array.bytes) return false;
  }
  return true;
}

std::string number(double value) {
  char out[32];
  std::snprintf(out, sizeof(out), "%.3f", value);
  return out;
}

void check_cases(const Engine& engine, const std::vector<Case>& cases, const Json& allowed) {
  for (const bool graph : {false, true}) {
    Session session(engine, graph);
    double worst = 0, again = 0, chunked = 0;
    std::string whole;
    bool bitwise = true;
    for (const Case& c : cases) {
      const Arrays first = session.run(c.inputs);
      const double error = error_of(first, c.expected, allowed);
      whole += number(error) + " ";
      worst = std::max(worst, error);
      for (int i = 0; i < 3; ++i) bitwise = bitwise && equal(session.run(c.inputs), first);
      again = std::max(again, error_of(session.run(c.inputs), c.expected, allowed));
      if (!engine.why_no_chunks().empty()) continue;
      for (const std::int64_t chunk : {1, 7}) {
        chunked = std::max(chunked, error_of(session.run_chunks(c.inputs, chunk), c.expected, allowed));
      }
    }
    const std::string how = graph ? "CUDA graph: " : "plain: ";
    check(worst <= 1 && again <= 1, how + "corners in turn on one session, " + whole + "of what is allowed");
    check(bitwise, how + "a call again, bitwise");
    if (engine.why_no_chunks().empty()) {
      check(chunked <= 1, how + "chunks of 1 and 7, " + number(chunked) + " of what is allowed");
    }
  }
}

void check_beyond_profile(const Engine& engine, const Case& c) {
  Session session(engine);
  const Arrays before = session.run(c.inputs);
  Arrays large = c.inputs;
  for (auto& [name, array] : large) {
    const TensorInfo& tensor = engine.tensor(name);
    if (tensor.time_axis < 0 || engine.states().count(name) != 0) continue;
    Dims dims = array.dims;
    dims[static_cast<std::size_t>(tensor.time_axis)] = tensor.max[static_cast<std::size_t>(tensor.time_axis)] + 1;
    array = Array(array.type, dims);
  }
  std::string said;
  try {
    session.run(large);
  } catch (const Error& error) {
    said = error.what();
  }
  check(said.find("; the engine takes ") != std::string::npos, "T beyond the profile: " + said);
  check(equal(session.run(c.inputs), before), "the session works on after it, bitwise");
}

void check_threads(const Engine& engine, const std::vector<Case>& cases) {
  constexpr std::size_t kThreads = 8;
  std::vector<Arrays> alone;
  for (std::size_t i = 0; i < kThreads; ++i) alone.push_back(Session(engine).run(cases[i % cases.size()].inputs));
  std::vector<int> good(kThreads, 0);
  std::vector<std::unique_ptr<Session>> sessions;
  for (std::size_t i = 0; i < kThreads; ++i) sessions.push_back(std::make_unique<Session>(engine, i % 2 == 1));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      try {
        for (int round = 0; round < 20; ++round)
          good[i] += equal(sessions[i]->run(cases[i % cases.size()].inputs), alone[i]);
      } catch (const std::exception& error) {
        std::printf("thread %zu: %s\n", i, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check(good == std::vector<int>(kThreads, 20), "eight sessions on eight threads, 20 calls each, bitwise");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s ENGINE LIB MODEL_FOLDER\n", argv[0]);
    return 2;
  }
  try {
    const std::string folder = argv[3];
    const Engine engine(argv[1], {argv[2]});
    std::vector<Case> cases;
    for (int i = 0; i < 5; ++i) {
      const std::string one = folder + "/cases/" + std::to_string(i);
      if (DIR* there = opendir(one.c_str())) {
        closedir(there);
        cases.push_back({read_folder(one + "/in"), read_folder(one + "/out")});
      }
    }
    if (cases.empty()) fail(folder, " holds no cases");
    check_cases(engine, cases, parse_json(read_file(folder + "/tolerance.json"), "tolerance.json"));
    check_beyond_profile(engine, cases.front());
    const int sessions = NV_TENSORRT_MAJOR == 8 ? engine.engine().getNbOptimizationProfiles() : 8;
    if (sessions >= 8) {
      check_threads(engine, cases);
    } else {
      std::printf("not run: eight threads, the engine was built for %d session(s)\n", sessions);
    }
  } catch (const std::exception& error) {
    check(false, std::string("error: ") + error.what());
  }
  return failures == 0 ? 0 : 1;
}
