// Shared by the kernels and the description of the recurrent layers (ops/recurrent.cc).
#pragma once

#include <string>
#include <vector>

#include "graph/op_def.h"
#include "ops/recurrent_activation.h"

namespace trainrt::recurrent {

enum class CellKind : uint8_t { kLstm, kGru, kRnn };

// Everything of a node but its tensors.
struct Cell {
  CellKind kind = CellKind::kRnn;
  std::vector<Activation> activations;  // LSTM: f, g, h; GRU: f, g; RNN: f
  bool reverse = false;
  bool linear_before_reset = false;  // GRU
  bool input_forget = false;         // LSTM: the forget gate is 1 - input gate
  double clip = 0;                   // of pre-activations; 0: none
  int64_t steps = 0, batch = 0, hidden = 0;

  int64_t gates() const { return kind == CellKind::kLstm ? 4 : kind == CellKind::kGru ? 3 : 1; }
};

Cell cell_of(const Attributes& attributes, const Shape& xproj);
Activation activation_from_name(const std::string& name, double alpha, double beta);
// ONNX's default alpha and beta of an activation.
void default_parameters(const std::string& name, double& alpha, double& beta);

// Inputs of both operators, and further ones of the gradient.
enum Input { kXproj, kR, kRb, kH0, kC0, kP, kLens, kY, kCAll, kDy, kDhN, kDcN, kDcAll };

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec);
int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec);
void forward_fast(KernelContext& op);
void backward_fast(KernelContext& op);
void forward_reference(KernelContext& op);
void backward_reference(KernelContext& op);

}  // namespace trainrt::recurrent
