#include "runtime/parameter_store.h"

#include "graph/evaluator.h"

namespace trainrt {

ParameterStore::ParameterStore(Executor& executor, const Program& program)
    : executor_(executor), program_(program) {}

std::vector<std::string> ParameterStore::names() const {
  std::vector<std::string> names;
  for (const Value* value : executor_.persistent_values()) {
    names.push_back(value->name);
  }
  return names;
}

void ParameterStore::load_initial() {
  for (const Value* value : executor_.persistent_values()) {
    if (value->constant.defined() || value->source.load) {
      executor_.write(value->name, initial_value(*value));
    }
  }
}

void ParameterStore::load(const std::function<Tensor(const std::string&)>& whole) {
  for (const std::string& name : names()) {
    executor_.write(name, whole(name));
  }
}

std::vector<std::string> ParameterStore::owned_names() const {
  return program_.coordinates.data_rank == 0 && program_.coordinates.tensor_rank == 0
             ? names()
             : std::vector<std::string>{};
}

CheckpointTensor ParameterStore::piece(const std::string& name) const {
  CheckpointTensor piece;
  piece.name = name;
  piece.data = executor_.read(name);
  piece.shape = piece.data.shape();
  piece.offset.assign(piece.shape.size(), 0);
  return piece;
}

}  // namespace trainrt
