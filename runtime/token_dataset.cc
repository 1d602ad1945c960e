// Text as one long row of tokens, cut into consecutive windows: sample i reads tokens
// [i*S, i*S + S) and its labels are the tokens one further on, so every token is predicted once.
#include <cstring>

#include "graph/base/error.h"
#include "runtime/dataset.h"
#include "runtime/file_bytes.h"
#include "runtime/text_alphabet.h"

namespace trainrt {

namespace {

// Tokens as they lie in memory, 1, 2 or 4 bytes each.
class TokenDataset : public Dataset {
 public:
  TokenDataset(std::string path,
               std::vector<std::byte> bytes,
               size_t offset,
               int width,
               int64_t sequence,
               std::string alphabet = "")
      : path_(std::move(path)),
        bytes_(std::move(bytes)),
        offset_(offset),
        width_(width),
        sequence_(sequence),
        alphabet_(std::move(alphabet)) {
    TRAINRT_REQUIRE(sequence > 0,
                    kInvalidArgument,
                    "the model has no sequence dim to cut '",
                    path_,
                    "' into windows for");
    const int64_t num_tokens =
        static_cast<int64_t>((bytes_.size() - offset_) / static_cast<size_t>(width_));
    num_samples_ = (num_tokens - 1) / sequence;
    TRAINRT_REQUIRE(num_samples_ > 0,
                    kInvalidArgument,
                    "'",
                    path_,
                    "' holds ",
                    num_tokens,
                    " tokens, fewer than one window of ",
                    sequence,
                    " and the token after it");
    arrays_ = {
        {.name = "tokens", .dtype = DType::kInt64, .sample_shape = {sequence}},
        {.name = "labels", .dtype = DType::kInt64, .sample_shape = {sequence}, .is_labels = true}};
  }

  std::string description() const override { return path_; }
  int64_t num_samples() const override { return num_samples_; }
  const std::vector<DataArray>& arrays() const override { return arrays_; }
  std::string alphabet() const override { return alphabet_; }

  void read(int array, int64_t index, std::byte* out) const override {
    const std::byte* from =
        bytes_.data() + offset_ + static_cast<size_t>((index * sequence_ + array) * width_);
    for (int64_t i = 0; i < sequence_; ++i) {
      uint32_t token = 0;  // little-endian
      std::memcpy(&token, from + i * width_, static_cast<size_t>(width_));
      const int64_t wide = token;
      std::memcpy(out + i * 8, &wide, sizeof(wide));
    }
  }

 private:
  std::string path_;
  std::vector<std::byte> bytes_;
  size_t offset_;
  int width_;
  int64_t sequence_;
  std::string alphabet_;
  int64_t num_samples_ = 0;
  std::vector<DataArray> arrays_;
};

// Every second 16-bit number of 32-bit tokens below 65,536 is 0, and three of four of 64-bit ones.
void refuse_wide_tokens(const std::string& path, const std::vector<std::byte>& bytes) {
  constexpr size_t kFewest = 64;  // bytes that chance would not make so
  bool wide = bytes.size() >= kFewest && bytes.size() % 4 == 0;
  for (size_t i = 0; wide && i < bytes.size(); i += 4) {
    wide = bytes[i + 2] == std::byte{0} && bytes[i + 3] == std::byte{0};
  }
  TRAINRT_REQUIRE(!wide,
                  kInvalidArgument,
                  "'",
                  path,
                  "' looks like tokens of 32 or 64 bits (every second 16-bit number in it is 0); "
                  "wanted 16-bit tokens, or an llm.c header, which says how wide they are");
}

}  // namespace

std::unique_ptr<Dataset> open_token_file(const std::string& path, int64_t sequence) {
  std::vector<std::byte> bytes = read_file(path);
  // llm.c: 256 int32, of which magic, version, number of tokens; version 7 has 32-bit tokens
  // (llama 3, magic 20240801), else 16-bit (GPT-2, magic 20240520).
  int32_t header[3] = {};
  if (bytes.size() >= 1024) {
    std::memcpy(header, bytes.data(), sizeof(header));
  }
  const bool gpt2 = header[0] == 20240520;
  const bool llama3 = header[0] == 20240801;
  if (!gpt2 && !llama3) {  // nanoGPT: nothing but uint16
    TRAINRT_REQUIRE(bytes.size() % 2 == 0,
                    kInvalidArgument,
                    "'",
                    path,
                    "' has an odd number of bytes; wanted 16-bit tokens, or an llm.c header");
    refuse_wide_tokens(path, bytes);
    return std::make_unique<TokenDataset>(path, std::move(bytes), 0, 2, sequence);
  }
  const int width = llama3 ? 4 : 2;
  const int64_t found = static_cast<int64_t>(bytes.size() - 1024) / width;
  TRAINRT_REQUIRE(header[2] == found,
                  kInvalidArgument,
                  "'",
                  path,
                  "' holds ",
                  found,
                  " tokens, its header says ",
                  header[2]);
  return std::make_unique<TokenDataset>(path, std::move(bytes), 1024, width, sequence);
}

std::unique_ptr<Dataset> open_text_file(const std::string& path,
                                        int64_t sequence,
                                        const std::string& alphabet) {
  const std::vector<std::byte> bytes = read_file(path);
  const std::vector<uint32_t> text =
      code_points({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  const TextAlphabet numbers =
      alphabet.empty() ? TextAlphabet::of_text(text) : TextAlphabet::parse(alphabet);
  std::vector<std::byte> tokens(text.size() * 4);
  for (size_t i = 0; i < text.size(); ++i) {
    const std::optional<uint32_t> token = numbers.number_of(text[i]);
    TRAINRT_REQUIRE(token.has_value(),
                    kInvalidArgument,
                    "'",
                    path,
                    "' has '",
                    to_utf8(text[i]),
                    "' (code point ",
                    text[i],
                    ") as character ",
                    i,
                    ", which is none of the ",
                    numbers.size(),
                    " characters that the model was trained on; leave it out of the text, or train "
                    "a new model on a text that has it");
    std::memcpy(tokens.data() + i * 4, &*token, 4);
  }
  return std::make_unique<TokenDataset>(path, std::move(tokens), 0, 4, sequence, numbers.utf8());
}

}  // namespace trainrt
