#include "runtime/loss_scaler.h"

#include <cmath>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Below this even a gradient of float16's largest number would vanish when divided out again: what
// is not finite then is so at any scale.
constexpr double kSmallestScale = 1.0 / (1 << 24);

}  // namespace

LossScaler::LossScaler(const LossScaling& scaling)
    : scaling_(scaling), active_(true), scale_(scaling.init_scale) {
  TRAINRT_REQUIRE(scaling.growth_factor >= 1 && scaling.backoff_factor > 0 &&
                      scaling.backoff_factor < 1 && scaling.growth_interval >= 1 &&
                      scaling.init_scale >= kSmallestScale && std::isfinite(scaling.init_scale),
                  kInvalidArgument,
                  "loss scaling wants --init-scale above 0, --growth-factor of at least 1, "
                  "--backoff-factor between 0 and 1 and --growth-interval of at least 1; got ",
                  scaling.init_scale,
                  ", ",
                  scaling.growth_factor,
                  ", ",
                  scaling.backoff_factor,
                  " and ",
                  scaling.growth_interval);
}

void LossScaler::restore(double scale, int64_t finite_steps) {
  if (active_) {
    scale_ = scale;
    finite_steps_ = finite_steps;
  }
}

void LossScaler::update(bool overflow) {
  if (!active_) {
    return;
  }
  if (overflow) {
    scale_ *= scaling_.backoff_factor;
    finite_steps_ = 0;
    TRAINRT_REQUIRE(scale_ >= kSmallestScale,
                    kNonFinite,
                    "the loss or the gradient is not finite at a loss scale of ",
                    scale_ / scaling_.backoff_factor,
                    " either, so training stops: numbers of the forward pass, which no scale "
                    "shrinks, are beyond float16's range of 65504. Try --precision bf16, whose "
                    "range is that of float32, or a smaller --lr or --clip-norm, or look for bad "
                    "values in the weights");
    return;
  }
  if (++finite_steps_ >= scaling_.growth_interval) {
    // The scale reaches the kernels as float32.
    const double grown = scale_ * scaling_.growth_factor;
    scale_ = std::isfinite(static_cast<float>(grown)) ? grown : scale_;
    finite_steps_ = 0;
  }
}

}  // namespace trainrt
