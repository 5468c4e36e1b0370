// As much JSON as a sidecar and a model's metadata need (RFC 8259). Numbers are double.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace flashrnn_edge {

struct Json {
  enum Kind { kNull, kBool, kNumber, kString, kArray, kObject } kind = kNull;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<Json> items;                            // of an array
  std::vector<std::pair<std::string, Json>> members;  // of an object, in their order

  Json() = default;
  Json(bool value) : kind(kBool), boolean(value) {}
  Json(double value) : kind(kNumber), number(value) {}
  Json(std::string value) : kind(kString), string(std::move(value)) {}
  Json(const char* value) : Json(std::string(value)) {}
  static Json array(std::vector<Json> items = {});
  static Json object(std::vector<std::pair<std::string, Json>> members = {});

  // A member; null where there is none or this is no object.
  const Json& operator[](const std::string& key) const;
  std::string dump() const;
};

// Throws Error, which names `what`.
Json parse_json(const std::string& text, const std::string& what);

}  // namespace flashrnn_edge
