#include "json.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace flashrnn_edge {
namespace {

constexpr int kDeepest = 100;

class Parser {
 public:
  Parser(const std::string& text, const std::string& what) : text_(text), what_(what) {}

  Json document() {
    Json value = parse(0);
    skip_space();
    if (at_ != text_.size()) refuse("something follows the end");
    return value;
  }

 private:
  [[noreturn]] void refuse(const char* why) const { fail(what_, " is not JSON: ", why, " at byte ", at_); }
  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) != nullptr) ++at_;
  }
  bool take(char expected) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != expected) return false;
    ++at_;
    return true;
  }
  bool take_word(const char* word) {
    const std::size_t length = std::strlen(word);
    if (text_.compare(at_, length, word) != 0) return false;
    at_ += length;
    return true;
  }

  Json parse(int depth) {
    if (depth > kDeepest) refuse("too deep");
    if (take('{')) return object(depth);
    if (take('[')) return array(depth);
    if (take('"')) return string();
    if (take_word("true")) return true;
    if (take_word("false")) return false;
    if (take_word("null")) return {};
    return number();
  }

  Json object(int depth) {
    Json value = Json::object();
    if (take('}')) return value;
    do {
      if (!take('"')) refuse("a name was expected");
      std::string name = string();
      if (!take(':')) refuse("':' was expected");
      value.members.emplace_back(std::move(name), parse(depth + 1));
    } while (take(','));
    if (!take('}')) refuse("'}' was expected");
    return value;
  }

  Json array(int depth) {
    Json value = Json::array();
    if (take(']')) return value;
    do {
      value.items.push_back(parse(depth + 1));
    } while (take(','));
    if (!take(']')) refuse("']' was expected");
    return value;
  }

  Json number() {
    const char* begin = text_.c_str() + at_;
    char* end = nullptr;
    const double value = std::strtod(begin, &end);
    if (end == begin || !std::isfinite(value)) refuse("a value was expected");
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  std::string string() {
    std::string value;
    for (;;) {
      if (at_ >= text_.size()) refuse("a string does not end");
      const char c = text_[at_++];
      if (c == '"') return value;
      if (static_cast<unsigned char>(c) < 0x20) refuse("a string holds a control character");
      if (c != '\\') {
        value += c;
        continue;
      }
      const char escaped = at_ < text_.size() ? text_[at_++] : '\0';
      constexpr const char kFrom[] = "\"\\/bfnrt";
      constexpr const char kTo[] = "\"\\/\b\f\n\r\t";
      if (const char* found = escaped != '\0' ? std::strchr(kFrom, escaped) : nullptr) {
        value += kTo[found - kFrom];
      } else if (escaped == 'u') {
        append_utf8(value, code_point());
      } else {
        refuse("an unknown escape");
      }
    }
  }

  unsigned hex4() {
    unsigned value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < text_.size() ? text_[at_++] : '\0';
      const char* digits = "0123456789abcdef";
      const char* found = c != '\0' ? std::strchr(digits, c | 0x20) : nullptr;
      if (found == nullptr) refuse("\\u needs four digits");
      value = value << 4 | static_cast<unsigned>(found - digits);
    }
    return value;
  }
  unsigned code_point() {
    const unsigned high = hex4();
    if (high < 0xd800 || high >= 0xdc00 || !take_word("\\u")) return high;
    return 0x10000 + ((high - 0xd800) << 10) + (hex4() - 0xdc00);
  }
  static void append_utf8(std::string& out, unsigned code) {
    if (code < 0x80) {
      out += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    out += static_cast<char>((0xf00 >> more & 0xff) | code >> 6 * more);
    for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
  }

  const std::string& text_;
  const std::string& what_;
  std::size_t at_ = 0;
};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += std::string("\\") + c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

Json Json::array(std::vector<Json> items) {
  Json value;
  value.kind = kArray;
  value.items = std::move(items);
  return value;
}

Json Json::object(std::vector<std::pair<std::string, Json>> members) {
  Json value;
  value.kind = kObject;
  value.members = std::move(members);
  return value;
}

const Json& Json::operator[](const std::string& key) const {
  static const Json null;
  for (const auto& [name, value] : members) {
    if (name == key) return value;
  }
  return null;
}

std::string Json::dump() const {
  std::string out;
  switch (kind) {
    case kNull:
      return "null";
    case kBool:
      return boolean ? "true" : "false";
    case kNumber: {
      char text[32];
      std::snprintf(text, sizeof(text), number == std::floor(number) ? "%.0f" : "%.17g", number);
      return text;
    }
    case kString:
      return quoted(string);
    case kArray:
      for (const Json& item : items) out += (out.empty() ? "" : ", ") + item.dump();
      return "[" + out + "]";
    case kObject:
      for (const auto& [name, value] : members) out += (out.empty() ? "" : ", ") + quoted(name) + ": " + value.dump();
      return "{" + out + "}";
  }
  return out;
}

Json parse_json(const std::string& text, const std::string& what) { return Parser(text, what).document(); }

}  // namespace flashrnn_edge
