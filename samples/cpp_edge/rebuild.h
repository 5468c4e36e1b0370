// The command that builds an engine anew: what the sidecar keeps for it, and its text.
#pragma once

#include <string>

#include "builder.h"
#include "json.h"

namespace flashrnn_edge {

// Adds to a sidecar: command, the words of flashrnn-deploy for the same engine without -o, and sessions and cublas,
// which are of this program alone, where they were used.
void add_command(const std::string& model, const BuildOptions& options, Json& sidecar);

// "rebuild it with: flashrnn_edge build ..." of the engine at this path, as far as the sidecar says it.
std::string rebuild(const std::string& engine, const Json& sidecar);

}  // namespace flashrnn_edge
