// Point-to-point messages through a shared window. A short message lies in its channel's slot; a
// longer one in a parcel, a memory file of the sender that is used again once its receiver has
// emptied it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/shared_window.h"

namespace trainrt {

class SharedMail {
 public:
  // `processes`: id of each rank's process.
  SharedMail(const SharedWindow& window, int rank, std::vector<int64_t> processes);
  ~SharedMail();
  SharedMail(const SharedMail&) = delete;
  SharedMail& operator=(const SharedMail&) = delete;

  // False when the channel is full; wait_for_room() waits until its receiver has taken one out.
  bool send(const void* data, int64_t bytes, int peer, int tag);
  bool wait_for_room(int peer, std::chrono::milliseconds timeout) const;

  // Takes the next message of this tag, of which it copies at most `bytes`, and returns its size;
  // nothing when none has come. wait_for_message() waits for one of any tag. Throws kCommunication
  // when a parcel cannot be opened.
  std::optional<int64_t> receive(void* data, int64_t bytes, int peer, int tag);
  bool wait_for_message(int peer, std::chrono::milliseconds timeout) const;

 private:
  struct Parcel {
    int descriptor = -1;
    std::byte* memory = nullptr;  // a flag, and from the next cache line on the message
    int64_t capacity = 0;
  };
  Parcel& free_parcel(int64_t bytes);
  const Parcel& parcel_of(int peer, const MessageSlot& slot);
  void take_all(int peer);

  const SharedWindow& window_;
  int rank_;
  std::vector<int64_t> processes_;
  std::vector<Parcel> own_;
  std::map<std::pair<int, int>, Parcel> opened_;                         // by peer and descriptor
  std::map<std::pair<int, int>, std::deque<MessageSlot>> not_received_;  // by peer and tag
};

}  // namespace trainrt
