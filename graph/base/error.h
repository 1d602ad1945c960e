// The one exception class of trainrt, and the macros that raise it.
//
// An Error is a code, a message and context lines added on the way up. A message says where (file,
// node, tensor, rank), what was found, what was wanted, and what to do. The library never exits and
// never prints to stdout: main.cc maps the code to the process's exit code.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trainrt {

enum class ErrorCode {
  kInvalidArgument,  // usage, configuration, data, contradictory pins     exit 2
  kInvalidModel,     // the model file is wrong                            exit 3
  kUnsupported,      // the model is right, but we cannot do it            exit 3
  kInfeasiblePlan,   // does not fit, or a plan that cannot be carried out exit 4
  kOutOfMemory,      // a device or the host ran out of memory             exit 5
  kDevice,           // a device or its library failed                     exit 5
  kCommunication,    // a peer died, stalled or disagrees                  exit 5
  kIo,               // a file or a pipe failed                            exit 5
  kNonFinite,        // loss or gradient became NaN or infinite            exit 1
  kInternal,         // a bug of ours                                      exit 1
};

const char* error_code_name(ErrorCode code);

// The exit code that CONTRACT section 1 assigns to `code`.
int exit_code(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string message);

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // Adds a line of context, innermost first, e.g. "while importing 'model.onnx'".
  Error& add_context(std::string line);

  // Message followed by the context lines, one per line.
  const char* what() const noexcept override { return full_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
  std::string full_;
};

// Joins its arguments with operator<<: concat("axis ", axis, " of ", name).
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// The elements of `items` closest to `word` by edit distance, best first, at most `limit`: for
// "unknown X 'foo', did you mean ..." messages.
std::vector<std::string> near_names(std::string_view word,
                                    const std::vector<std::string>& items,
                                    size_t limit = 3);

// ", did you mean 'a' or 'b'?" for near_names(), or an empty string.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& items);

namespace internal {
[[noreturn]] void check_failed(const char* file,
                               int line,
                               const char* condition,
                               const std::string& message);
}  // namespace internal

}  // namespace trainrt

// Bad input: TRAINRT_REQUIRE(axis < ndim, kInvalidModel, "node '", name, "': axis ", axis, ...).
#define TRAINRT_REQUIRE(condition, code, ...)                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      throw ::trainrt::Error(::trainrt::ErrorCode::code, ::trainrt::concat(__VA_ARGS__)); \
    }                                                                                     \
  } while (false)

// Unconditional form of TRAINRT_REQUIRE.
#define TRAINRT_FAIL(code, ...) \
  throw ::trainrt::Error(::trainrt::ErrorCode::code, ::trainrt::concat(__VA_ARGS__))

// A bug of ours: on in release builds too, reports file and line.
#define TRAINRT_CHECK(condition, ...)                                                        \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      ::trainrt::internal::check_failed(                                                     \
          __FILE__, __LINE__, #condition, ::trainrt::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                        \
  } while (false)
