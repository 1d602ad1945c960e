// Makes a CPU device as slow as it is to be: kernels take kernel time / speed. A sleep lasts some
// 60 us longer than asked for, more than a small kernel takes, so what kernels owe is added up and
// slept off when it is worth it, or when others would notice that it is missing; what was overslept
// counts towards the next.
#pragma once

#include <chrono>
#include <functional>

namespace trainrt {

class Slowdown {
 public:
  using Duration = std::chrono::steady_clock::duration;
  // Sleeps so long, at least, and returns for how long it was.
  using Sleep = std::function<Duration(Duration)>;

  explicit Slowdown(double speed, Sleep sleep = sleep_by_clock);

  bool active() const { return speed_ < 1; }
  void worked(Duration kernel);
  // Before others are told something, and where a part of the step ends.
  void settle();

 private:
  static Duration sleep_by_clock(Duration time);

  double speed_;
  Sleep sleep_;
  Duration debt_{0};  // below zero: overslept
};

}  // namespace trainrt
