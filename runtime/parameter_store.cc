#include "runtime/parameter_store.h"

#include <algorithm>
#include <unordered_set>

#include "graph/evaluator.h"
#include "graph/random.h"

namespace trainrt {

namespace {

// Where a piece lies in the whole tensor: a box, since every cut is a range of equal units.
struct Box {
  Shape offset;
  Shape shape;
};

Box box_of(const TensorPiece& piece) {
  Box box{Shape(piece.whole_shape.size(), 0), piece.whole_shape};
  for (const PieceCut& cut : piece.cuts) {
    const size_t dim = static_cast<size_t>(cut.dim);
    const int64_t unit = box.shape[dim] / cut.count;
    box.offset[dim] += cut.range.offset * unit;
    box.shape[dim] = cut.range.size * unit;
  }
  return box;
}

}  // namespace

ParameterStore::ParameterStore(Executor& executor, std::map<std::string, TensorPiece> pieces)
    : executor_(executor), pieces_(std::move(pieces)) {}

std::vector<std::string> ParameterStore::names() const {
  std::vector<std::string> names;
  for (const Value* value : executor_.persistent_values()) {
    names.push_back(value->name);
  }
  return names;
}

void ParameterStore::share_ownership(Communicator* world) {
  owned_ = names();
  if (world == nullptr || world->world_size() == 1) {
    return;
  }
  // Every rank tells which pieces it has, as hashes of name and place; a rank owns what no earlier
  // rank has.
  std::vector<int64_t> own;
  for (const std::string& name : owned_) {
    uint64_t key = hash_name(name);
    const auto piece = pieces_.find(name);
    if (piece != pieces_.end()) {
      for (const int64_t offset : box_of(piece->second).offset) {
        key = mix_keys(key, static_cast<uint64_t>(offset));
      }
    }
    own.push_back(static_cast<int64_t>(key));
  }
  const size_t size = static_cast<size_t>(world->world_size());
  std::vector<int64_t> counts(size);
  const int64_t count = static_cast<int64_t>(own.size());
  world->all_gather(&count, counts.data(), std::vector<int64_t>(size, 1), DType::kInt64);
  int64_t total = 0;
  int64_t before = 0;  // keys of earlier ranks
  for (size_t r = 0; r < size; ++r) {
    before += static_cast<int>(r) < world->rank() ? counts[r] : 0;
    total += counts[r];
  }
  std::vector<int64_t> all(static_cast<size_t>(total));
  world->all_gather(own.data(), all.data(), counts, DType::kInt64);
  const std::unordered_set<int64_t> earlier(all.begin(), all.begin() + before);
  std::vector<std::string> mine;
  for (size_t i = 0; i < own.size(); ++i) {
    if (earlier.count(own[i]) == 0) {
      mine.push_back(owned_[i]);
    }
  }
  owned_ = std::move(mine);
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
    const Tensor tensor = whole(name);
    if (!tensor.defined()) {
      continue;
    }
    const auto piece = pieces_.find(name);
    executor_.write(name, piece == pieces_.end() ? tensor : cut_piece(tensor, piece->second));
  }
}

CheckpointTensor ParameterStore::piece(const std::string& name) const {
  CheckpointTensor result;
  result.name = name;
  result.data = executor_.read(name);
  const auto piece = pieces_.find(name);
  if (piece == pieces_.end()) {
    result.shape = result.data.shape();
    result.offset.assign(result.shape.size(), 0);
  } else {
    result.shape = piece->second.whole_shape;
    result.offset = box_of(piece->second).offset;
  }
  return result;
}

}  // namespace trainrt
