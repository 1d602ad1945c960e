// Rank 0's side of the rendezvous: one thread that talks to every rank.
#pragma once

#include <memory>

#include "parallel/rendezvous.h"

namespace trainrt {

// Messages are JSON objects with a "type". To the hub: hello, exchange, activity, failed, stalled,
// bye. From it: noted (let in), welcome, refused, alive, exchanged, failed.
class RendezvousHub {
 public:
  // Listens at the place's socket or port. Throws kCommunication when the port is taken.
  RendezvousHub(const RankPlace& place, std::chrono::milliseconds deadline);
  ~RendezvousHub();
  RendezvousHub(const RendezvousHub&) = delete;
  RendezvousHub& operator=(const RendezvousHub&) = delete;

  int port() const;
  // After a failure before all had come: waits until all others have come and been told, at most
  // until those that never come are late.
  void wait_until_told();
  // Waits until every rank that came has left, or `timeout`.
  void wait_until_left(std::chrono::milliseconds timeout);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trainrt
