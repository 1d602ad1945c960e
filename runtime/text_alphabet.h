// The characters (Unicode code points) of a text and the numbers that a model knows them by. A
// trained model brings its alphabet along, as metadata: any other text must be numbered alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trainrt {

// The key of an ONNX model's metadata that holds its alphabet, characters in order of their
// numbers.
inline constexpr const char* kAlphabetKey = "trainrt.alphabet";

// From UTF-8; a byte that is not part of a valid sequence stands for itself.
std::vector<uint32_t> code_points(std::string_view utf8);
std::string to_utf8(uint32_t code_point);

class TextAlphabet {
 public:
  // Numbers in the order given; throws kInvalidArgument for a character that comes twice.
  static TextAlphabet parse(const std::string& utf8);
  // The characters of a text, numbered in ascending order.
  static TextAlphabet of_text(const std::vector<uint32_t>& text);

  int64_t size() const { return static_cast<int64_t>(characters_.size()); }
  std::optional<uint32_t> number_of(uint32_t character) const;
  std::string utf8() const;

 private:
  explicit TextAlphabet(std::vector<uint32_t> characters);

  std::vector<uint32_t> characters_;  // by number
  std::map<uint32_t, uint32_t> numbers_;
};

}  // namespace trainrt
