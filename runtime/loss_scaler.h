// Dynamic loss scaling for float16, by the rule of PyTorch's GradScaler [torch/amp/grad_scaler.py]:
// a step whose loss or gradient is not finite changes nothing but the scale, which shrinks by the
// back-off factor; after `growth_interval` finite steps in a row the scale grows by the growth
// factor.
//
// Every rank keeps a scaler of its own and feeds it with the same answer, that of the gradient's
// global norm, so the scales never differ. The state is saved with the checkpoint.
#pragma once

#include <cstdint>

namespace trainrt {

struct LossScaling {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // finite steps between growths
};

class LossScaler {
 public:
  // Off: the scale is 1 and stays, and a gradient that is not finite is an error elsewhere.
  LossScaler() = default;
  explicit LossScaler(const LossScaling& scaling);

  bool active() const { return active_; }
  double scale() const { return scale_; }
  int64_t finite_steps() const { return finite_steps_; }  // since the scale last changed

  // Continues where a checkpoint stood. Nothing happens when the scaler is off.
  void restore(double scale, int64_t finite_steps);

  // Takes note of a step's outcome. Throws kNonFinite when the scale has become so small that no
  // scale can be the reason.
  void update(bool overflow);

 private:
  LossScaling scaling_;
  bool active_ = false;
  double scale_ = 1;
  int64_t finite_steps_ = 0;
};

}  // namespace trainrt
