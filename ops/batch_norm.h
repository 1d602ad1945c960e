// The kernels of ops/batch_norm.cc, which describes them.
#pragma once

#include "graph/op_def.h"

namespace trainrt::batch_norm {

int64_t workspace(const OpContext& op, const DeviceSpec& spec);  // of the kernels over images
void moments(KernelContext& op);
void apply(KernelContext& op);
void grad_sums(KernelContext& op);
void input_grad(KernelContext& op);
void moments_reference(KernelContext& op);
void apply_reference(KernelContext& op);
void grad_sums_reference(KernelContext& op);
void input_grad_reference(KernelContext& op);

// Over channels alone: plain loops.
void statistics(KernelContext& op);
void fixed_moments(KernelContext& op);
void moments_grad(KernelContext& op);
void parameter_grad(KernelContext& op);

}  // namespace trainrt::batch_norm
