#include "runtime/slowdown.h"

#include <thread>
#include <utility>

namespace trainrt {

namespace {

constexpr std::chrono::milliseconds kWorthASleep{1};

}  // namespace

Slowdown::Slowdown(double speed, Sleep sleep) : speed_(speed), sleep_(std::move(sleep)) {}

void Slowdown::worked(Duration kernel) {
  if (!active()) {
    return;
  }
  debt_ += std::chrono::duration_cast<Duration>(kernel * (1 / speed_ - 1));
  if (debt_ > kWorthASleep) {
    settle();
  }
}

void Slowdown::settle() {
  if (debt_ > Duration::zero()) {
    debt_ -= sleep_(debt_);
  }
}

Slowdown::Duration Slowdown::sleep_by_clock(Duration time) {
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(time);
  return std::chrono::steady_clock::now() - begin;
}

}  // namespace trainrt
