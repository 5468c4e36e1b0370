#include "arguments.h"

#include <cerrno>
#include <cstdlib>
#include <limits>

#include "error.h"

namespace flashrnn_edge {
namespace {

struct Command {
  const char* name;
  const char* file;
  const char* what;
};
constexpr Command kCommands[] = {
    {"build", "MODEL.onnx", "builds an engine and its sidecar ENGINE.json, for this machine's TensorRT and GPU"},
    {"run", "ENGINE", "checks an engine against its sidecar and runs it"},
    {"info", "ENGINE", "checks an engine and prints its inputs, outputs and states"},
};

struct Option {
  const char* command;
  const char* name;
  const char* value;  // nullptr: it stands alone
  enum { kOnce, kNeeded, kOften } count;
  const char* what;
};
constexpr Option kOptions[] = {
    {"build", "-o", "ENGINE", Option::kNeeded, "the engine to write"},
    {"build", "--plugin", "LIB", Option::kOnce, "library with the FlashRNN plugins"},
    {"build", "--shape", "NAME=MIN:OPT:MAX", Option::kOften,
     "of an input (x=1x1x64:100x4x64:512x16x64) or a named axis (time=1:100:512); one alone is all three"},
    {"build", "--workspace", "MIB", Option::kOnce, "memory that TensorRT may use"},
    {"build", "--sessions", "N", Option::kOnce, "TensorRT 8: how many sessions one engine serves at once"},
    {"build", "--tf32", nullptr, Option::kOnce, "let float32 layers round to 10 bits, which is faster"},
    {"build", "--cublas", nullptr, Option::kOnce, "TensorRT 8: let layers use cuDNN and cuBLAS"},
    {"run", "--input", "NAME=FILE.npy", Option::kOften, "an input; states that are not given start at zero"},
    {"run", "-o", "DIR", Option::kNeeded, "folder for the outputs, NAME.npy each"},
    {"run", "--chunk", "STEPS", Option::kOnce, "feed so many steps at a time, states carried"},
    {"run", "--graph", nullptr, Option::kOnce, "replay calls as a CUDA graph"},
    {"run", "--repeat", "N", Option::kOnce, "time the last call N times more"},
    {"run", "--profile", nullptr, Option::kOnce, "time each layer"},
    {"run info", "--plugin", "LIB", Option::kOften, "library that the engine was built with"},
    {"run info", "--trust-engine", nullptr, Option::kOnce, "run an engine without a sidecar, or in spite of it"},
    {"build run info", "-v", nullptr, Option::kOnce, "print what TensorRT says"},
};

bool takes(const Option& option, const std::string& command) {
  return (' ' + std::string(option.command) + ' ').find(' ' + command + ' ') != std::string::npos;
}

const Command* find_command(const std::string& name) {
  for (const Command& command : kCommands) {
    if (name == command.name) return &command;
  }
  return nullptr;
}

template <class... Parts>
[[noreturn]] void refuse(const std::string& command, const Parts&... parts) {
  fail<UsageError>(parts..., "; see flashrnn_edge ", command, command.empty() ? "" : " ", "--help");
}

const Option& find_option(const std::string& command, const std::string& word) {
  std::string others;
  for (const Option& option : kOptions) {
    if (word != option.name) continue;
    if (takes(option, command)) return option;
    others = option.command;
  }
  if (others.empty()) refuse(command, command, " has no option ", word);
  if (const std::size_t space = others.find(' '); space != std::string::npos) others.replace(space, 1, " and ");
  refuse(command, command, " takes no ", word, ", which is an option of ", others);
}

std::string help_of(const Command& command) {
  std::string line = std::string("flashrnn_edge ") + command.name + " " + command.file, options;
  for (const Option& option : kOptions) {
    if (!takes(option, command.name)) continue;
    const std::string form =
        std::string(option.name) + (option.value == nullptr ? "" : " ") + (option.value == nullptr ? "" : option.value);
    if (option.count == Option::kNeeded) line += " " + form;
    options += "  " + form + std::string(form.size() < 26 ? 26 - form.size() : 1, ' ') + option.what +
               (option.count == Option::kOften ? "; may be repeated" : "") + "\n";
  }
  return "usage: " + line + " [options]\n" + command.name + " " + command.what + ".\n\n" + options;
}

}  // namespace

std::vector<std::string> Arguments::all(const std::string& name) const {
  const auto found = options.find(name);
  return found == options.end() ? std::vector<std::string>() : found->second;
}

std::string Arguments::one(const std::string& name) const {
  const std::vector<std::string> given = all(name);
  return given.empty() ? "" : given.back();
}

int Arguments::number(const std::string& name) const {
  if (!has(name)) return 0;
  const std::string text = one(name);
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (*end != '\0' || value < 1 || value > std::numeric_limits<int>::max()) {
    refuse(command, name, " '", text, "': give a whole number from 1 on");
  }
  return static_cast<int>(value);
}

std::string help(const std::string& command) {
  if (const Command* one = find_command(command)) return help_of(*one);
  std::string text = "usage: flashrnn_edge COMMAND ...\n\n";
  for (const Command& each : kCommands) {
    text += std::string("  ") + each.name + std::string(7 - std::string(each.name).size(), ' ') + each.what + "\n";
  }
  return text + "\nflashrnn_edge COMMAND --help lists its options; flashrnn_edge --version says what this is.\n";
}

Arguments parse_arguments(const std::vector<std::string>& words) {
  Arguments arguments;
  std::string& name = arguments.command;
  if (words.empty()) refuse("", "give a command: build, run or info");
  name = words[0] == "-h" ? "--help" : words[0];
  if (name == "--help" || name == "--version") return arguments;
  const Command* command = find_command(name);
  if (command == nullptr) refuse("", "unknown command ", name, ": there are build, run and info");
  std::vector<std::string> files;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "-h" || word == "--help" || word == "--version") {
      arguments.file = name;
      name = word == "-h" ? "--help" : word;
      return arguments;
    }
    if (word.size() < 2 || word[0] != '-') {
      files.push_back(word);
      continue;
    }
    const Option& option = find_option(name, word);
    std::vector<std::string>& values = arguments.options[word];
    if (option.value == nullptr) continue;
    if (i + 1 == words.size()) refuse(name, word, " needs a value, ", option.value);
    if (!values.empty() && option.count != Option::kOften) refuse(name, word, " is given twice");
    values.push_back(words[++i]);
  }
  if (files.size() != 1) refuse(name, name, " takes one ", command->file, ", and ", files.size(), " are given");
  arguments.file = files[0];
  for (const Option& option : kOptions) {
    if (option.count == Option::kNeeded && takes(option, name) && !arguments.has(option.name)) {
      refuse(name, name, " needs ", option.name, " ", option.value);
    }
  }
  return arguments;
}

}  // namespace flashrnn_edge
