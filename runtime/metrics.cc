#include "runtime/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "graph/base/error.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

// Shortest text that reads back as the same number. JSON has no NaN: null.
std::string shortest(double value) {
  if (!std::isfinite(value)) {
    return "null";
  }
  char buffer[32];
  const auto [end, status] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  TRAINRT_CHECK(status == std::errc());
  return std::string(buffer, end);
}

std::string int_list(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) {
    text += concat(text.empty() ? "" : ",", value);
  }
  return "[" + text + "]";
}

// "1:02:03" or "2:03".
std::string clock_text(double seconds) {
  const auto total = static_cast<int64_t>(seconds);
  char buffer[48];
  if (total >= 3600) {
    std::snprintf(buffer,
                  sizeof(buffer),
                  "%ld:%02ld:%02ld",
                  static_cast<long>(total / 3600),
                  static_cast<long>(total / 60 % 60),
                  static_cast<long>(total % 60));
  } else {
    std::snprintf(buffer,
                  sizeof(buffer),
                  "%ld:%02ld",
                  static_cast<long>(total / 60),
                  static_cast<long>(total % 60));
  }
  return buffer;
}

// The lines of `path` that record steps up to `last`; a cut or strange line ends them.
std::string earlier_lines(const std::string& path, int64_t last) {
  std::ifstream stream(path);
  std::string kept;
  std::string line;
  while (std::getline(stream, line)) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer() ||
        object["step"].get<int64_t>() > last) {
      break;
    }
    kept += line + "\n";
  }
  return kept;
}

}  // namespace

std::string metrics_line(const StepMetrics& m) {
  return concat(
      "{\"step\":",
      m.step,
      ",\"loss\":",
      shortest(m.loss),
      ",\"lr\":",
      shortest(m.lr),
      ",\"grad_norm\":",
      shortest(m.grad_norm),
      ",\"samples\":",
      m.samples,
      ",\"step_seconds\":",
      shortest(m.step_seconds),
      ",\"peak_bytes\":",
      int_list(m.peak_bytes),
      ",\"position\":",
      m.position,
      ",\"epoch\":",
      shortest(m.epoch),
      m.loss_scale > 0 ? concat(",\"loss_scale\":",
                                shortest(m.loss_scale),
                                ",\"skipped\":",
                                m.skipped ? "true" : "false")
                       : "",
      m.tokens > 0
          ? concat(",\"tokens\":", m.tokens, ",\"padded_tokens\":", int_list(m.padded_tokens))
          : "",
      m.shares.empty() ? "" : concat(",\"shares\":", int_list(m.shares)),
      "}");
}

MetricsFile::MetricsFile(const std::string& path, int64_t keep_steps) : path_(path) {
  const std::string kept = keep_steps > 0 ? earlier_lines(path, keep_steps) : "";
  if (keep_steps > 0) {
    write_file_atomically(path, [&](std::ostream& out) { out << kept; });
  }
  errno = 0;
  stream_.open(path, keep_steps > 0 ? std::ios::app : std::ios::trunc);
  TRAINRT_REQUIRE(
      stream_.good(), kIo, "cannot write --metrics '", path, "': ", std::strerror(errno));
}

void MetricsFile::write(const StepMetrics& metrics) {
  errno = 0;
  stream_ << metrics_line(metrics) << std::endl;  // flushed: others read along
  TRAINRT_REQUIRE(stream_.good(),
                  kIo,
                  "cannot write --metrics '",
                  path_,
                  "': ",
                  errno != 0 ? std::strerror(errno) : "unknown reason");
}

Progress::Progress(int64_t total_steps)
    : total_steps_(total_steps),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  finish();
}

void Progress::finish() {
  if (open_) {
    std::fputs("\n", stderr);
    open_ = false;
  }
}

void Progress::show(const StepMetrics& m) {
  const auto now = std::chrono::steady_clock::now();
  if (first_step_ < 0) {
    first_step_ = m.step;
  }
  const double since = std::chrono::duration<double>(now - last_).count();
  const bool must = m.step == first_step_ || m.step == total_steps_;
  if (!must && since < (terminal_ ? 0.1 : 2.0)) {
    return;
  }
  last_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double done = static_cast<double>(m.step - first_step_ + 1);
  const double left = elapsed / done * static_cast<double>(total_steps_ - m.step);
  char text[256];
  std::snprintf(text,
                sizeof(text),
                "step %ld/%ld  epoch %.2f  loss %.4f  lr %.3g  grad norm %.3g  %.0f samples/s",
                static_cast<long>(m.step),
                static_cast<long>(total_steps_),
                m.epoch,
                m.loss,
                m.lr,
                m.grad_norm,
                static_cast<double>(m.samples) / std::max(m.step_seconds, 1e-9));
  if (!terminal_) {
    std::fprintf(stderr, "%s\n", text);
    return;
  }
  constexpr int kWidth = 20;
  const int filled = total_steps_ > 0 ? static_cast<int>(kWidth * m.step / total_steps_) : kWidth;
  std::string bar(static_cast<size_t>(filled), '#');
  bar.resize(kWidth, '.');
  std::fprintf(stderr, "\r[%s] %s  %s left\033[K", bar.c_str(), text, clock_text(left).c_str());
  std::fflush(stderr);
  open_ = true;
}

}  // namespace trainrt
