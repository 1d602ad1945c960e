// Whether to stop, which all ranks have to answer alike, whichever process got the signal.
#pragma once

#include <cstdint>

#include "parallel/communicator.h"

namespace trainrt {

class StopQuestion {
 public:
  // `world` may be null for a single rank.
  explicit StopQuestion(Communicator* world) : world_(world) {}

  // Collective, between steps: the largest signal of any rank; 0: none.
  int64_t decide(int64_t own);

  // The same where nobody may wait (a pipeline that runs on), called by all ranks after the same
  // steps: rank 0, the last to end a step, hears of every rank's signal then and passes the answer
  // on, which all know when the step after it ends.
  int64_t pass_on(int64_t own);

  // Whether an answer that all ranks know is to stop.
  bool asked() const { return answer_ != 0; }

 private:
  void take_answer();

  Communicator* world_;
  int64_t answer_ = 0;
  int64_t pending_ = 0;  // on rank 0: passed on, not yet known to all
  bool awaits_ = false;  // elsewhere: it is on its way
};

}  // namespace trainrt
