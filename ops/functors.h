// All functors that a fused kernel may call (ops/fused_elementwise.cu): NVRTC compiles these very
// files, which the build takes along as text, and those of this folder that they include. They may
// use what ops/device_std.cuh has of the standard library.
#pragma once

#include "ops/add.h"
#include "ops/clip.h"
#include "ops/elu.h"
#include "ops/exp.h"
#include "ops/gelu.h"
#include "ops/hard_sigmoid.h"
#include "ops/min_max.h"
#include "ops/mod.h"
#include "ops/mul.h"
#include "ops/neg.h"
#include "ops/pow.h"
#include "ops/relu.h"
#include "ops/round.h"
#include "ops/running_average.h"
#include "ops/same.h"
#include "ops/swish.h"
#include "ops/tanh.h"
#include "ops/trigonometry.h"
