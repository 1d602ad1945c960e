#include "graph/base/json.h"

#include <algorithm>

namespace trainrt {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostExcerptBytes = 60;

std::string place(std::string_view text, size_t at) {
  const std::string_view before = text.substr(0, at);
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return concat("line ",
                std::count(before.begin(), before.end(), '\n') + 1,
                ", column ",
                at - line_start + 1);
}

// nlohmann counts the bytes that it has read, the one that is wrong included.
std::string syntax_error(std::string_view text, size_t bytes_read) {
  if (bytes_read == 0 || bytes_read > text.size()) {
    return "it ends too early, at " + place(text, text.size());
  }
  const auto wrong = static_cast<unsigned char>(text[bytes_read - 1]);
  return concat("at ",
                place(text, bytes_read - 1),
                ", where it has ",
                wrong >= 0x20 && wrong < 0x7f ? concat("'", text[bytes_read - 1], "'")
                                              : concat("byte ", int{wrong}));
}

}  // namespace

Json parse_json(std::string_view text, const std::string& what, ErrorCode code) {
  const auto check_depth = [&](int depth, Json::parse_event_t event, const Json&) {
    const bool opens =
        event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (opens && depth >= kMostJsonDepth) {
      throw Error(
          code, concat(what, " has lists and objects nested more than ", kMostJsonDepth, " deep"));
    }
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const Json::parse_error& error) {
    throw Error(code, concat(what, " is not JSON: ", syntax_error(text, error.byte)));
  } catch (const Json::out_of_range&) {
    throw Error(code, concat(what, " has a number that is too large"));
  }
}

std::string json_excerpt(const Json& value) {
  std::string text = value.dump();
  if (text.size() <= kMostExcerptBytes) {
    return text;
  }
  size_t end = kMostExcerptBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) {
    --end;  // within a character of UTF-8
  }
  return concat(text.substr(0, end), "... (", text.size(), " characters)");
}

}  // namespace trainrt
