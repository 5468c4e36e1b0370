#include "rebuild.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace flashrnn_edge {
namespace {

using Words = std::vector<std::string>;

// For a POSIX shell.
std::string quoted(const std::string& word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || (c != '\0' && std::strchr("_@%+=:,./-", c) != nullptr);
  });
  if (plain && !word.empty()) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\"'\"'" : std::string(1, c);
  return out + "'";
}

std::string line(const std::string& program, const Words& words) {
  std::string text = program;
  for (const std::string& word : words) text += " " + quoted(word);
  return text;
}

std::string file_of(const Json& entry, const char* unknown) {
  return entry["file"].kind == Json::kString ? entry["file"].string : unknown;
}

// The words of flashrnn-deploy that the sidecar keeps; those of an older one and of a damaged one as far as it says.
Words command_of(const Json& sidecar) {
  Words words;
  for (const Json& word : sidecar["command"].items) words.push_back(word.string);
  const bool damaged = std::find(words.begin(), words.end(), "") != words.end();
  if (words.size() > 1 && !damaged) return words;
  words = {"build-engine", file_of(sidecar["model"], "MODEL.onnx")};
  const bool unknown = sidecar.members.empty() || sidecar["library"].kind == Json::kObject;
  if (unknown) words.insert(words.end(), {"--plugins", file_of(sidecar["library"], "LIB")});
  if (sidecar["rtx"].boolean) words.emplace_back("--rtx");
  return words;
}

// --shape of every input: this program has no defaults for the axes that were not named.
void add_shapes(const Json& shapes, Words& words) {
  if (shapes.kind != Json::kObject) words.insert(words.end(), {"--shape", "NAME=MIN:OPT:MAX"});
  for (const auto& [name, profile] : shapes.members) {
    std::string sizes;
    for (const char* key : {"min", "opt", "max"}) {
      std::string shape;
      for (const Json& size : profile[key].items) shape += (shape.empty() ? "" : "x") + size.dump();
      if (!shape.empty()) sizes += (sizes.empty() ? "" : ":") + shape;
    }
    if (!sizes.empty()) words.insert(words.end(), {"--shape", name + "=" + sizes});  // else it is a scalar
  }
}

}  // namespace

void add_command(const std::string& model, const BuildOptions& options, Json& sidecar) {
  Json words = Json::array({"build-engine", model});
  const auto add = [&](const char* flag, const std::string& value) {
    words.items.insert(words.items.end(), {flag, value});
  };
  if (!options.plugin.empty()) add("--plugins", options.plugin);
  for (const std::string& shape : options.shapes) add("--shapes", shape);
  if (options.workspace_mib > 0) add("--workspace", std::to_string(options.workspace_mib));
  if (options.tf32) words.items.emplace_back("--tf32");
  sidecar.members.emplace_back("command", words);
  if (options.sessions > 1) sidecar.members.emplace_back("sessions", static_cast<double>(options.sessions));
  if (options.cublas) sidecar.members.emplace_back("cublas", true);
}

std::string rebuild(const std::string& engine, const Json& sidecar) {
  Words theirs = command_of(sidecar), ours = {"build", theirs[1]};
  for (std::size_t i = 2; i < theirs.size(); ++i) {
    const std::string value = i + 1 < theirs.size() ? theirs[i + 1] : "";
    if (theirs[i] == "--plugins") ours.insert(ours.end(), {"--plugin", value});
    if (theirs[i] == "--workspace") ours.insert(ours.end(), {"--workspace", value});
    if (theirs[i] == "--tf32") ours.emplace_back("--tf32");
  }
  add_shapes(sidecar["shapes"], ours);
  if (sidecar["sessions"].number > 1) ours.insert(ours.end(), {"--sessions", sidecar["sessions"].dump()});
  if (sidecar["cublas"].boolean) ours.emplace_back("--cublas");
  ours.insert(ours.end(), {"-o", engine});
  const std::string here = "rebuild it with: " + line("flashrnn_edge", ours);
  if (!sidecar["rtx"].boolean) return here;
  theirs.insert(theirs.end(), {"-o", engine});
  return "it is an engine of TensorRT-RTX, which this program does not run (" + line("flashrnn-deploy", theirs) +
         " makes it); for this program, " + here;
}

}  // namespace flashrnn_edge
