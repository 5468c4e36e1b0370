// Errors of the binding: thrown inside the library, returned as an OrtStatus from every function that the runtime
// calls.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "../contract.h"
#include "ort_api.h"

namespace flashrnn::ort {

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
