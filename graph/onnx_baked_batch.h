// Batch sizes that an exporter baked into a model: its trace ran at one example batch, and a
// Reshape or Expand kept that number as a constant, or the inputs' dims did.
//
// A model is translated at the example batch first, where every number is right by construction.
// Translated again at the wanted batch, each constant shape operand that did not change although
// its operand's batch did is rewritten: the axis that held the example batch (or a multiple, when
// dims were merged) is scaled.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/shape.h"

namespace trainrt {

class BatchRewriter {
 public:
  // Notes what a translation at the example batch does.
  struct Record {
    struct Node {
      Shape input;  // of the operand that is reshaped or expanded; {} if none
      Shape output;
      std::vector<int64_t> operand;  // the shape operand
    };
    int64_t batch = 1;
    std::unordered_map<std::string, Node> nodes;
  };

  // How much is rewritten. Reshapes alone are safe: the number of elements tells. Expand and
  // ConstantOfShape are rewritten only when a model cannot be bound without.
  enum class Extent { kReshape, kAll };

  BatchRewriter(const Record& example, int64_t batch, Extent extent)
      : example_(example), batch_(batch), extent_(extent) {}

  // The shape operand that `node` should have instead of `operand`, if it must be another one.
  std::optional<std::vector<int64_t>> rewrite(const std::string& node,
                                              const std::string& op_type,
                                              const Shape& input,
                                              const std::vector<int64_t>& operand);

  void note(const std::string& node) { rewritten_.push_back(node); }
  const std::vector<std::string>& rewritten() const { return rewritten_; }

 private:
  // Where a Reshape puts the batch.
  std::optional<size_t> reshaped_axis(const Record::Node& example, const Shape& input);
  // `at`: where a Reshape's or Resize's output has the batch.
  std::optional<size_t> baked_axis(const std::string& op_type,
                                   std::optional<size_t> at,
                                   const Shape& input,
                                   const std::vector<int64_t>& operand) const;

  const Record& example_;
  const int64_t batch_;
  const Extent extent_;
  // Example size of an axis that holds the batch merged with others -> after how many rows of it
  // the next sample comes: 1 when time comes first ([time, batch] merged), `heads` in [batch,
  // heads].
  std::map<int64_t, std::set<int64_t>> units_;
  std::vector<std::string> rewritten_;
};

// Whether `now` is `example` with at most one axis scaled from batch to batch.
bool scales_with_batch(const Shape& example, const Shape& now, int64_t from, int64_t to);

}  // namespace trainrt
