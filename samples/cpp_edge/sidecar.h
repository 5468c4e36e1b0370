// The file beside an engine, ENGINE.json: what it was built from, with and for. `flashrnn-deploy build-engine` and this
// sample write the same format and check it in the same order, before TensorRT sees the engine.
#pragma once

#include <string>
#include <vector>

#include "json.h"

namespace flashrnn_edge {

inline constexpr const char* kToolVersion = "0.1.0";  // flashrnn_deploy's
inline constexpr const char* kPluginVersion = "1";
inline constexpr const char* kPluginNamespace = "";

struct Running {
  std::string tensorrt;            // of the loaded library: major.minor.patch
  std::string compute_capability;  // of the current device: "8.7"
  std::vector<std::string> plugins;
};

std::string sidecar_path(const std::string& engine);

// Throws Error where an engine and its sidecar cannot be written here, or would replace one of `inputs` or a file that
// is no sidecar.
void check_output(const std::string& engine, const std::vector<std::string>& inputs);

// What is the same for every engine; the caller adds shapes, states, axes, lengths, dtypes and options.
Json describe_engine(const std::string& engine_bytes, const std::string& model, const std::string& plugin,
                     const Running& here);

// The sidecar of an engine. Throws Error where there is none or it cannot be read.
Json read_sidecar(const std::string& engine);

// Each throws Error, one sentence with the command that builds the engine anew, where something does not match: the
// engine's bytes; then TensorRT, the device and the plugin library.
void check_bytes(const std::string& engine, const std::string& engine_bytes, const Json& sidecar);
void check_place(const std::string& engine, const Json& sidecar, const Running& here);

}  // namespace flashrnn_edge
