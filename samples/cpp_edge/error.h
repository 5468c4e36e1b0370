#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashrnn_edge {

// What the user can mend: one line, with the cure.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A mistake in the command line alone.
struct UsageError : Error {
  using Error::Error;
};

template <class Kind = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Kind(text.str());
}

// A message of TensorRT's, which may have line ends, for one line.
inline std::string one_line(std::string text) {
  for (char& c : text) c = c == '\n' || c == '\r' ? ' ' : c;
  return text;
}

}  // namespace flashrnn_edge
