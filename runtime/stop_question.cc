#include "runtime/stop_question.h"

#include <algorithm>

#include "runtime/communication_node.h"

namespace trainrt {

// What was passed on after the step before.
void StopQuestion::take_answer() {
  if (awaits_ && world_->rank() != 0) {
    world_->recv(&pending_, sizeof(pending_), 0, kAnswerTag);
  }
  answer_ = std::max(answer_, pending_);
  awaits_ = false;
}

int64_t StopQuestion::decide(int64_t own) {
  take_answer();
  answer_ = std::max(answer_, own);
  if (world_ != nullptr) {
    world_->all_reduce(&answer_, 1, DType::kInt64, ReductionKind::kMax);
  }
  return answer_;
}

int64_t StopQuestion::pass_on(int64_t own) {
  if (world_->rank() != 0) {
    world_->send(&own, sizeof(own), 0, kSignalTag);
    take_answer();
  } else {
    int64_t most = own, other = 0;
    for (int rank = 1; rank < world_->world_size(); ++rank) {
      world_->recv(&other, sizeof(other), rank, kSignalTag);
      most = std::max(most, other);
    }
    take_answer();
    pending_ = most;
    for (int rank = 1; rank < world_->world_size(); ++rank) {
      world_->send(&pending_, sizeof(pending_), rank, kAnswerTag);
    }
  }
  awaits_ = true;
  return answer_;
}

}  // namespace trainrt
