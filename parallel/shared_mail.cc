#include "parallel/shared_mail.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "graph/base/error.h"
#include "parallel/memory_file.h"

namespace trainrt {

namespace {

constexpr int64_t kParcelHeader = 64;

// Whether a message lies in the parcel. New memory is zero: it is empty.
std::atomic<uint32_t>& is_full(std::byte* memory) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory);
}

}  // namespace

SharedMail::SharedMail(const SharedWindow& window, int rank, std::vector<int64_t> processes)
    : window_(window), rank_(rank), processes_(std::move(processes)) {}

SharedMail::~SharedMail() {
  const auto release = [](const Parcel& parcel) {
    ::munmap(parcel.memory, static_cast<size_t>(parcel.capacity + kParcelHeader));
    ::close(parcel.descriptor);
  };
  std::for_each(own_.begin(), own_.end(), release);
  for (const auto& [place, parcel] : opened_) {
    release(parcel);
  }
}

SharedMail::Parcel& SharedMail::free_parcel(int64_t bytes) {
  for (Parcel& parcel : own_) {
    if (parcel.capacity >= bytes && is_full(parcel.memory).load(std::memory_order_acquire) == 0) {
      return parcel;
    }
  }
  const std::optional<MemoryFile> file = create_memory_file(bytes + kParcelHeader);
  TRAINRT_REQUIRE(file.has_value(), kOutOfMemory, "no memory for a message of ", bytes, " bytes");
  own_.push_back({file->descriptor, static_cast<std::byte*>(file->memory), bytes});
  return own_.back();
}

bool SharedMail::send(const void* data, int64_t bytes, int peer, int tag) {
  Channel& channel = window_.channel(rank_, peer);
  const uint32_t number = channel.sent.count.load(std::memory_order_relaxed);
  if (!channel.taken.has_reached(number - Channel::kSlots + 1)) {
    return false;
  }
  MessageSlot& slot = channel.slots[number % Channel::kSlots];
  slot.bytes = bytes;
  slot.tag = tag;
  slot.parcel = -1;
  if (bytes <= MessageSlot::kInlineBytes) {
    std::copy_n(static_cast<const std::byte*>(data), bytes, slot.payload);
  } else {
    const Parcel& parcel = free_parcel(bytes);
    std::copy_n(static_cast<const std::byte*>(data), bytes, parcel.memory + kParcelHeader);
    is_full(parcel.memory).store(1, std::memory_order_relaxed);
    slot.parcel = parcel.descriptor;
    std::memcpy(slot.payload, &parcel.capacity, sizeof(parcel.capacity));
  }
  channel.sent.raise();
  return true;
}

bool SharedMail::wait_for_room(int peer, std::chrono::milliseconds timeout) const {
  Channel& channel = window_.channel(rank_, peer);
  return channel.taken.wait(channel.sent.count.load() - Channel::kSlots + 1, timeout);
}

bool SharedMail::wait_for_message(int peer, std::chrono::milliseconds timeout) const {
  Channel& channel = window_.channel(peer, rank_);
  return channel.sent.wait(channel.taken.count.load() + 1, timeout);
}

void SharedMail::take_all(int peer) {
  Channel& channel = window_.channel(peer, rank_);
  for (uint32_t number = channel.taken.count.load(); channel.sent.has_reached(number + 1);
       ++number) {
    const MessageSlot& slot = channel.slots[number % Channel::kSlots];
    not_received_[{peer, slot.tag}].push_back(slot);
    channel.taken.raise();
  }
}

const SharedMail::Parcel& SharedMail::parcel_of(int peer, const MessageSlot& slot) {
  Parcel& parcel = opened_[{peer, slot.parcel}];
  if (parcel.memory == nullptr) {
    std::memcpy(&parcel.capacity, slot.payload, sizeof(parcel.capacity));
    const std::optional<MemoryFile> file = open_memory_file(
        processes_.at(static_cast<size_t>(peer)), slot.parcel, parcel.capacity + kParcelHeader);
    TRAINRT_REQUIRE(file.has_value(),
                    kCommunication,
                    "a message of process ",
                    processes_[static_cast<size_t>(peer)],
                    " cannot be opened; has it ended?");
    parcel.descriptor = file->descriptor;
    parcel.memory = static_cast<std::byte*>(file->memory);
  }
  return parcel;
}

std::optional<int64_t> SharedMail::receive(void* data, int64_t bytes, int peer, int tag) {
  std::deque<MessageSlot>& box = not_received_[{peer, tag}];
  if (box.empty()) {
    take_all(peer);
  }
  if (box.empty()) {
    return std::nullopt;
  }
  const MessageSlot slot = box.front();
  box.pop_front();
  std::byte* to = static_cast<std::byte*>(data);
  const int64_t copied = std::min(bytes, slot.bytes);
  if (slot.parcel < 0) {
    std::copy_n(slot.payload, copied, to);
  } else {
    const Parcel& parcel = parcel_of(peer, slot);
    std::copy_n(parcel.memory + kParcelHeader, copied, to);
    is_full(parcel.memory).store(0, std::memory_order_release);
  }
  return slot.bytes;
}

}  // namespace trainrt
