#include "sidecar.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "error.h"
#include "files.h"
#include "rebuild.h"

namespace flashrnn_edge {
namespace {

constexpr int kFormat = 1;

Json file_facts(const std::string& path, const std::string& bytes) {
  return Json::object(
      {{"file", file_name(path)}, {"sha256", sha256(bytes)}, {"bytes", static_cast<double>(bytes.size())}});
}

std::string file_of(const Json& entry, const char* unknown) {
  return entry["file"].kind == Json::kString ? entry["file"].string : unknown;
}

void check_form(const std::string& engine, const Json& sidecar) {
  const std::string path = sidecar_path(engine);
  if (sidecar["format"].kind != Json::kNumber) {
    fail(path, " is not the sidecar of an engine: it has no format; ", rebuild(engine, sidecar));
  }
  if (sidecar["format"].number != kFormat) {
    fail("the sidecar ", path, " has format ", sidecar["format"].number, ", and this program reads format ", kFormat,
         "; ", rebuild(engine, sidecar));
  }
  constexpr struct {
    const char* key;
    Json::Kind kind;
  } kFields[] = {{"engine", Json::kObject}, {"tensorrt", Json::kString}, {"rtx", Json::kBool},
                 {"model", Json::kObject},  {"shapes", Json::kObject},   {"states", Json::kArray},
                 {"axes", Json::kObject},   {"dtypes", Json::kObject}};
  for (const auto& [key, kind] : kFields) {
    if (sidecar[key].kind != kind) {
      fail("the sidecar ", path, " is damaged at '", key, "'; ", rebuild(engine, sidecar));
    }
  }
  for (const Json& pair : sidecar["states"].items) {
    const bool good =
        pair.items.size() == 2 && pair.items[0].kind == Json::kString && pair.items[1].kind == Json::kString;
    if (!good) fail("the sidecar ", path, " is damaged at 'states'; ", rebuild(engine, sidecar));
  }
}

void check_library(const std::string& engine, const Json& sidecar, const Running& here) {
  const Json &plugin = sidecar["plugin"], &wanted = sidecar["library"];
  if (plugin.kind == Json::kNull || wanted.kind == Json::kNull) return;
  if (plugin["version"].string != kPluginVersion || plugin["namespace"].string != kPluginNamespace) {
    fail(engine, " was built with version ", plugin["version"].string, " of the plugins in the namespace '",
         plugin["namespace"].string, "'; this program has version ", kPluginVersion, ", namespace '", kPluginNamespace,
         "'; ", rebuild(engine, sidecar));
  }
  const std::string name = file_of(wanted, "LIB");
  if (here.plugins.empty()) {
    fail(engine, " holds the FlashRNN plugins, version ", kPluginVersion, ", namespace '", kPluginNamespace,
         "': pass the library ", name, " that it was built with, --plugin LIB");
  }
  const bool found = std::any_of(here.plugins.begin(), here.plugins.end(), [&](const std::string& path) {
    return sha256(read_file(path)) == wanted["sha256"].string;
  });
  if (!found) {
    fail(engine, " was built with the library ", name, " of SHA-256 ", wanted["sha256"].string.substr(0, 12),
         "..., and ", here.plugins.front(), " is another build: pass that one; or ", rebuild(engine, sidecar));
  }
}

}  // namespace

std::string sidecar_path(const std::string& engine) { return engine + ".json"; }

void check_output(const std::string& engine, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path folder = fs::absolute(engine, error).parent_path();
  if (!fs::is_directory(folder, error)) fail("-o ", engine, ": there is no folder ", folder.string());
  if (::access(folder.c_str(), W_OK) != 0) fail("-o ", engine, ": the folder ", folder.string(), " cannot be written");
  for (const std::string& path : {engine, sidecar_path(engine)}) {
    if (fs::exists(path, error) && !fs::is_regular_file(path, error))
      fail("-o ", engine, ": ", path, " is no file that could be replaced; choose another name");
    for (const std::string& input : inputs) {
      if (fs::equivalent(path, input, error)) fail("-o ", engine, " would replace ", input, ": choose another name");
    }
  }
  const std::string path = sidecar_path(engine);
  if (!fs::exists(path, error)) return;
  Json there;
  try {
    there = parse_json(read_file(path), path);
  } catch (const Error&) {  // said below
  }
  if (there["format"].kind != Json::kNumber || there["engine"].kind != Json::kObject)
    fail("-o ", engine, " would replace ", path, ", which is not the sidecar of an engine: choose another name");
}

Json describe_engine(const std::string& engine_bytes, const std::string& model, const std::string& plugin,
                     const Running& here) {
  Json facts = Json::object();
  facts.members = {
      {"format", static_cast<double>(kFormat)},
      {"flashrnn_deploy", kToolVersion},
      {"engine", Json::object({{"sha256", sha256(engine_bytes)}, {"bytes", static_cast<double>(engine_bytes.size())}})},
      {"tensorrt", here.tensorrt},
      {"rtx", false},
      {"compute_capability", here.compute_capability},
      {"plugin",
       plugin.empty() ? Json() : Json::object({{"version", kPluginVersion}, {"namespace", kPluginNamespace}})},
      {"library", plugin.empty() ? Json() : file_facts(plugin, read_file(plugin))},
      {"model", file_facts(model, read_file(model))},
  };
  return facts;
}

Json read_sidecar(const std::string& engine) {
  const std::string path = sidecar_path(engine);
  std::error_code error;  // another reason than that there is none is read_file's to tell
  if (std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found) {
    fail(
        engine, " has no sidecar ", file_name(path),
        ", which says what it was built for: build it with `flashrnn-deploy build-engine` or `flashrnn_edge build`, or "
        "pass --trust-engine to run an engine that you trust");
  }
  const std::string text = read_file(path);
  Json sidecar;
  try {
    sidecar = parse_json(text, "the sidecar " + path);
  } catch (const Error& damage) {
    fail(damage.what(), "; ", rebuild(engine, {}));
  }
  check_form(engine, sidecar);
  return sidecar;
}

void check_bytes(const std::string& engine, const std::string& engine_bytes, const Json& sidecar) {
  const Json& wanted = sidecar["engine"];
  if (wanted["bytes"].number != static_cast<double>(engine_bytes.size())) {
    fail(engine, " has ", engine_bytes.size(), " bytes, and its sidecar says ", wanted["bytes"].dump(),
         ": it is damaged, or of another build; ", rebuild(engine, sidecar));
  }
  if (wanted["sha256"].string != sha256(engine_bytes)) {
    fail(engine, " does not have the SHA-256 that its sidecar says: it is damaged, or of another build; ",
         rebuild(engine, sidecar));
  }
}

void check_place(const std::string& engine, const Json& sidecar, const Running& here) {
  const std::string product = sidecar["rtx"].boolean ? "TensorRT-RTX" : "TensorRT";
  const std::string &tensorrt = sidecar["tensorrt"].string, &capability = sidecar["compute_capability"].string;
  std::string targets = capability;
  for (const Json& target : sidecar["targets"].items) {
    if (capability.empty()) targets += (targets.empty() ? "" : " or ") + target.string;
  }
  if (sidecar["rtx"].boolean || tensorrt != here.tensorrt || capability != here.compute_capability) {
    fail(engine, " was built with ", product, " ", tensorrt, " for compute capability ",
         targets.empty() ? "(none)" : targets, "; this is TensorRT ", here.tensorrt, " on compute capability ",
         here.compute_capability, "; ", rebuild(engine, sidecar));
  }
  check_library(engine, sidecar, here);
}

}  // namespace flashrnn_edge
