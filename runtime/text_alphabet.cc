#include "runtime/text_alphabet.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr uint32_t kLastCodePoint = 0x10FFFF;

bool is_surrogate(uint32_t code_point) {
  return code_point >= 0xD800 && code_point <= 0xDFFF;
}

// Of the sequence that `lead` begins; 0 for a byte that begins none.
size_t sequence_length(uint32_t lead) {
  if (lead < 0x80) {
    return 1;
  }
  if (lead < 0xC2 || lead > 0xF4) {
    return 0;
  }
  return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

}  // namespace

std::vector<uint32_t> code_points(std::string_view utf8) {
  std::vector<uint32_t> points;
  points.reserve(utf8.size());
  for (size_t i = 0; i < utf8.size();) {
    const auto byte_at = [&](size_t k) {
      return static_cast<uint32_t>(static_cast<unsigned char>(utf8[k]));
    };
    const uint32_t lead = byte_at(i);
    const size_t length = sequence_length(lead);
    uint32_t point = length <= 1 ? lead : lead & (0xFFu >> (length + 1));
    bool valid = length > 0 && i + length <= utf8.size();
    for (size_t k = 1; valid && k < length; ++k) {
      const uint32_t next = byte_at(i + k);
      valid = (next & 0xC0u) == 0x80u;
      point = point << 6 | (next & 0x3Fu);
    }
    valid = valid && !is_surrogate(point) && point <= kLastCodePoint;
    points.push_back(valid ? point : lead);
    i += valid ? length : 1;
  }
  return points;
}

std::string to_utf8(uint32_t code_point) {
  const auto tail = [&](int shift) {
    return static_cast<char>(0x80u | (code_point >> shift & 0x3Fu));
  };
  if (code_point < 0x80) {
    return {static_cast<char>(code_point)};
  }
  if (code_point < 0x800) {
    return {static_cast<char>(0xC0u | code_point >> 6), tail(0)};
  }
  if (code_point < 0x10000) {
    return {static_cast<char>(0xE0u | code_point >> 12), tail(6), tail(0)};
  }
  return {static_cast<char>(0xF0u | code_point >> 18), tail(12), tail(6), tail(0)};
}

TextAlphabet::TextAlphabet(std::vector<uint32_t> characters) : characters_(std::move(characters)) {
  for (const uint32_t character : characters_) {
    const bool is_new = numbers_.emplace(character, numbers_.size()).second;
    TRAINRT_REQUIRE(is_new,
                    kInvalidArgument,
                    "the model's alphabet (metadata '",
                    kAlphabetKey,
                    "') holds '",
                    to_utf8(character),
                    "' twice");
  }
}

TextAlphabet TextAlphabet::parse(const std::string& utf8) {
  return TextAlphabet(code_points(utf8));
}

TextAlphabet TextAlphabet::of_text(const std::vector<uint32_t>& text) {
  std::vector<uint32_t> characters = text;
  std::sort(characters.begin(), characters.end());
  characters.erase(std::unique(characters.begin(), characters.end()), characters.end());
  return TextAlphabet(std::move(characters));
}

std::optional<uint32_t> TextAlphabet::number_of(uint32_t character) const {
  const auto found = numbers_.find(character);
  return found == numbers_.end() ? std::nullopt : std::optional<uint32_t>(found->second);
}

std::string TextAlphabet::utf8() const {
  std::string text;
  for (const uint32_t character : characters_) {
    text += to_utf8(character);
  }
  return text;
}

}  // namespace trainrt
