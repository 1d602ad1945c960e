#include "graph/base/error.h"

#include <algorithm>
#include <numeric>

namespace trainrt {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kInvalidModel:
      return "invalid model";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kInfeasiblePlan:
      return "infeasible plan";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kCommunication:
      return "communication";
    case ErrorCode::kIo:
      return "I/O";
    case ErrorCode::kNonFinite:
      return "non-finite";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return 2;
    case ErrorCode::kInvalidModel:
    case ErrorCode::kUnsupported:
      return 3;
    case ErrorCode::kInfeasiblePlan:
      return 4;
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kDevice:
    case ErrorCode::kCommunication:
    case ErrorCode::kIo:
      return 5;
    case ErrorCode::kNonFinite:
    case ErrorCode::kInternal:
      return 1;
  }
  return 1;
}

Error::Error(ErrorCode code, std::string message)
    : std::runtime_error(message), code_(code), message_(std::move(message)), full_(message_) {}

Error& Error::add_context(std::string line) {
  full_ += "\n  " + std::move(line);
  return *this;
}

namespace {

// Levenshtein distance, one row at a time: O(|a| |b|) time, O(|b|) space.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      const size_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replace, above + 1, row[j - 1] + 1});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> near_names(std::string_view word,
                                    const std::vector<std::string>& items,
                                    size_t limit) {
  std::vector<std::pair<size_t, std::string>> scored;
  for (const std::string& item : items) {
    const size_t distance = edit_distance(word, item);
    const bool contains = !word.empty() && item.find(word) != std::string::npos;
    if (contains || distance <= std::max<size_t>(2, word.size() / 3)) {
      scored.emplace_back(distance, item);
    }
  }
  std::stable_sort(
      scored.begin(), scored.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(limit, scored.size()); ++i) {
    names.push_back(scored[i].second);
  }
  return names;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& items) {
  const std::vector<std::string> names = near_names(word, items);
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += i == 0 ? ", did you mean '" : (i + 1 == names.size() ? "' or '" : "', '");
    text += names[i];
  }
  return names.empty() ? text : text + "'?";
}

namespace internal {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw Error(ErrorCode::kInternal,
              concat("internal error at ",
                     file,
                     ":",
                     line,
                     ": check '",
                     condition,
                     "' failed",
                     message.empty() ? "" : ": ",
                     message));
}

}  // namespace internal

}  // namespace trainrt
