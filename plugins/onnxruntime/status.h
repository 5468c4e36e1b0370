// Errors of the binding: thrown inside the library, returned as an OrtStatus from every function that the runtime
// calls.
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "ort_api.h"

namespace flashrnn::ort {

// The caller's mistake: a tensor or attribute outside the contract.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

// Throws what a call into the runtime reports.
inline void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw std::runtime_error(message);
}

template <class Body>
OrtStatus* guarded(const OrtApi& api, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (const InvalidArgument& error) {
    return api.CreateStatus(kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus(kFail, error.what());
  } catch (...) {
    return api.CreateStatus(kFail, "flashrnn: unknown error");
  }
}

}  // namespace flashrnn::ort
