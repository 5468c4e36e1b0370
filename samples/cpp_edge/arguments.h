// The command line of flashrnn_edge: which options each command takes, and the help that says so.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace flashrnn_edge {

struct Arguments {
  std::string command;  // build, run, info; or --help, --version
  std::string file;     // the model or engine
  std::map<std::string, std::vector<std::string>> options;

  bool has(const std::string& name) const { return options.count(name) != 0; }
  std::vector<std::string> all(const std::string& name) const;
  std::string one(const std::string& name) const;  // "" where it is not given
  int number(const std::string& name) const;       // 0 where it is not given; throws UsageError
};

// Throws UsageError, one line that points to --help.
Arguments parse_arguments(const std::vector<std::string>& words);

// Of a command; of all where it is "".
std::string help(const std::string& command);

}  // namespace flashrnn_edge
