// Parameters and state as whole logical tensors, over the pieces that a rank's executor holds.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/program.h"
#include "runtime/checkpoint.h"
#include "runtime/executor.h"

namespace trainrt {

class ParameterStore {
 public:
  // `pieces`: Program::pieces.
  ParameterStore(Executor& executor, std::map<std::string, TensorPiece> pieces);

  // Decides which rank saves which piece: of several ranks with the same one the first. Collective
  // over `world` (null: one rank).
  void share_ownership(Communicator* world);

  // Initial values: from the model's file, or zeros. Throws what TensorSource::load throws.
  void load_initial();
  // From whole tensors; an undefined one leaves its contents. Throws kInvalidArgument when a shape
  // differs.
  void load(const std::function<Tensor(const std::string& name)>& whole);

  std::vector<std::string> names() const;                                 // of what this rank holds
  const std::vector<std::string>& owned_names() const { return owned_; }  // and is to save
  // This rank's piece of a tensor.
  CheckpointTensor piece(const std::string& name) const;

 private:
  Executor& executor_;
  std::map<std::string, TensorPiece> pieces_;
  std::vector<std::string> owned_;
};

}  // namespace trainrt
