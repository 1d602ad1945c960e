#include "runtime/metrics.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
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

// Of one number.
std::string format(const char* how, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), how, value);
  return buffer;
}

// Columns of the terminal; 80 where it does not say.
int terminal_width() {
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col : 80;
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

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return format(unit > 0 && value < 10 ? "%.1f" : "%.0f", value) + " " + kUnits[unit];
}

std::string progress_text(const StepMetrics& m, const ProgressFigures& figures, int width) {
  struct Part {
    std::string text;
    int rank;  // the part with the highest goes first
  };
  std::vector<Part> parts;
  if (figures.bar) {
    constexpr int kBar = 20;
    const int64_t total = figures.total_steps;
    const auto filled =
        total > 0 ? static_cast<size_t>(static_cast<double>(m.step) / total * kBar) : kBar;
    std::string bar(filled, '#');
    bar.resize(kBar, '.');
    parts.push_back({"[" + bar + "]", 4});
  }
  const int64_t peak =
      m.peak_bytes.empty() ? 0 : *std::max_element(m.peak_bytes.begin(), m.peak_bytes.end());
  parts.push_back({concat("step ", m.step, "/", figures.total_steps), 0});
  parts.push_back({format("epoch %.2f", m.epoch), 5});
  parts.push_back({format("loss %.4f", m.loss), 0});
  if (std::isfinite(m.lr)) {
    parts.push_back({format("lr %.3g", m.lr), 6});
  }
  parts.push_back(m.skipped ? Part{"skipped", 1} : Part{format("grad norm %.3g", m.grad_norm), 7});
  const double rate = figures.samples_per_second;
  parts.push_back({format(rate < 10 ? "%.2g samples/s" : "%.0f samples/s", rate), 1});
  parts.push_back({bytes_text(peak), 3});
  if (figures.seconds_left >= 0) {
    parts.push_back({clock_text(figures.seconds_left) + " left", 2});
  }
  const auto joined = [&] {
    std::string line;
    for (const Part& part : parts) {
      line += (line.empty() ? "" : "  ") + part.text;
    }
    return line;
  };
  std::string line = joined();
  while (width > 0 && static_cast<int>(line.size()) > width && parts.size() > 1) {
    const auto least = [](const Part& a, const Part& b) { return a.rank < b.rank; };
    parts.erase(std::max_element(parts.begin(), parts.end(), least));
    line = joined();
  }
  return width > 0 ? line.substr(0, static_cast<size_t>(width)) : line;
}

MetricsFile::MetricsFile(const std::string& path, int64_t keep_steps)
    : path_(path), stream_(standard_stream(path)) {
  if (stream_ != nullptr) {
    return;
  }
  stream_ = &file_;
  const std::string kept = keep_steps > 0 ? earlier_lines(path, keep_steps) : "";
  if (keep_steps > 0) {
    write_file_atomically(path, [&](std::ostream& out) { out << kept; });
  }
  errno = 0;
  file_.open(path, keep_steps > 0 ? std::ios::app : std::ios::trunc);
  TRAINRT_REQUIRE(
      stream_->good(), kIo, "cannot write --metrics '", path, "': ", std::strerror(errno));
}

void MetricsFile::write(const StepMetrics& metrics) {
  errno = 0;
  *stream_ << metrics_line(metrics) << std::endl;  // flushed: others read along
  TRAINRT_REQUIRE(stream_->good(),
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
  samples_ += m.samples;
  const double since = std::chrono::duration<double>(now - last_).count();
  const bool first = m.step == first_step_;
  if (!first && m.step != total_steps_ && since < (terminal_ ? 0.1 : 2.0)) {
    return;
  }
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double done = static_cast<double>(m.step - first_step_ + 1);
  ProgressFigures figures;
  figures.total_steps = total_steps_;
  // From one line to the next, with all that is done between steps.
  figures.samples_per_second =
      static_cast<double>(samples_) / std::max(first ? elapsed : since, 1e-9);
  last_ = now;
  samples_ = 0;
  if (!terminal_) {
    std::fprintf(stderr, "%s\n", progress_text(m, figures, 0).c_str());
    return;
  }
  figures.seconds_left = elapsed / done * static_cast<double>(total_steps_ - m.step);
  figures.bar = true;
  std::fprintf(stderr, "\r%s\033[K", progress_text(m, figures, terminal_width() - 1).c_str());
  std::fflush(stderr);
  open_ = true;
}

}  // namespace trainrt
