// The NCCL of the double: ranks are threads of one process, each with a device of its own. The work
// of a call runs when every rank's stream has reached its part, and then for all ranks at once.
#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "graph/dtype.h"
#include "tests/cuda_double/cuda_double.h"

namespace {

// What the ranks of one communicator share.
struct Group {
  std::mutex mutex;
  std::vector<ncclComm*> members;  // by rank; null until joined
  int joined = 0;
  bool aborted = false;
  // The calls that some ranks have made and others have not, by their number.
  struct Meeting;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;
  std::map<std::pair<int64_t, int>, std::shared_ptr<Group>> parts;  // of splits, by number, color
  std::map<int64_t, std::vector<std::array<int, 3>>> splits;        // color, key, rank
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0, size = 1;
  int64_t calls = 0, splits = 0;
};

namespace {

// One rank's part of a call: buffers and sizes.
struct Part {
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  int root = 0;
  bool given = false;
};

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };

struct Group::Meeting {
  std::vector<Part> parts;
  std::shared_ptr<cuda_double::Rendezvous> rendezvous;
};

template <typename T>
T combine(T a, T b, ncclRedOp_t op) {
  if constexpr (std::is_same_v<T, trainrt::Float16> || std::is_same_v<T, trainrt::BFloat16>) {
    return T(combine(static_cast<float>(a), static_cast<float>(b), op));
  } else {
    return op == ncclMax ? std::max(a, b) : op == ncclMin ? std::min(a, b) : static_cast<T>(a + b);
  }
}

template <typename Fn>
void dispatch(ncclDataType_t type, Fn&& fn) {
  switch (type) {
    case ncclFloat32:
      return fn(float{});
    case ncclFloat64:
      return fn(double{});
    case ncclFloat16:
      return fn(trainrt::Float16{});
    case ncclBfloat16:
      return fn(trainrt::BFloat16{});
    case ncclInt32:
      return fn(int32_t{});
    case ncclInt64:
      return fn(int64_t{});
    case ncclUint32:
      return fn(uint32_t{});
    case ncclUint64:
      return fn(uint64_t{});
    case ncclInt8:
      return fn(int8_t{});
    default:
      return fn(uint8_t{});
  }
}

// Carries out a call for all ranks.
void compute(Kind kind, const std::vector<Part>& parts, ncclDataType_t type, ncclRedOp_t op) {
  dispatch(type, [&](auto tag) {
    using T = decltype(tag);
    const size_t ranks = parts.size(), count = parts[0].count;
    const auto send = [&](size_t r) { return static_cast<const T*>(parts[r].send); };
    const auto receive = [&](size_t r) { return static_cast<T*>(parts[r].receive); };
    if (kind == Kind::kAllGather) {
      std::vector<T> all;
      for (size_t r = 0; r < ranks; ++r) {
        all.insert(all.end(), send(r), send(r) + count);
      }
      for (size_t r = 0; r < ranks; ++r) {
        std::copy(all.begin(), all.end(), receive(r));
      }
      return;
    }
    if (kind == Kind::kBroadcast) {
      const size_t root = static_cast<size_t>(parts[0].root);
      const std::vector<T> data(send(root), send(root) + count);
      for (size_t r = 0; r < ranks; ++r) {
        std::copy(data.begin(), data.end(), receive(r));
      }
      return;
    }
    const size_t total = kind == Kind::kReduceScatter ? count * ranks : count;
    std::vector<T> sums(send(0), send(0) + total);
    for (size_t r = 1; r < ranks; ++r) {
      for (size_t i = 0; i < total; ++i) {
        sums[i] = combine(sums[i], send(r)[i], op);
      }
    }
    for (size_t r = 0; r < ranks; ++r) {
      if (kind == Kind::kAllReduce) {
        std::copy(sums.begin(), sums.end(), receive(r));
      } else if (kind == Kind::kReduceScatter) {
        std::copy_n(sums.begin() + static_cast<std::ptrdiff_t>(r * count), count, receive(r));
      } else if (static_cast<int>(r) == parts[0].root) {
        std::copy(sums.begin(), sums.end(), receive(r));
      }
    }
  });
}

size_t bytes_of(ncclDataType_t type) {
  size_t bytes = 0;
  dispatch(type, [&bytes](auto tag) { bytes = sizeof(tag); });
  return bytes;
}

bool on_device(const void* data, size_t bytes) {
  return bytes == 0 || cuda_double::is_device_range(data, bytes);
}

ncclResult_t meet(ncclComm* comm,
                  Kind kind,
                  const Part& part,
                  ncclDataType_t type,
                  ncclRedOp_t op,
                  cudaStream_t stream) {
  if (comm == nullptr) {
    return ncclInvalidArgument;
  }
  const size_t ranks = static_cast<size_t>(comm->size), bytes = part.count * bytes_of(type);
  const size_t sent = kind == Kind::kReduceScatter ? bytes * ranks : bytes;
  const size_t received = kind == Kind::kAllGather ? bytes * ranks : bytes;
  const bool sends = kind != Kind::kBroadcast || part.root == comm->rank;
  const bool receives = kind != Kind::kReduce || part.root == comm->rank;
  if ((sends && !on_device(part.send, sent)) || (receives && !on_device(part.receive, received))) {
    return ncclInvalidArgument;
  }
  std::shared_ptr<Group::Meeting> meeting;
  {
    const std::lock_guard lock(comm->group->mutex);
    if (comm->group->aborted) {
      return ncclInvalidUsage;
    }
    auto& slot = comm->group->meetings[comm->calls++];
    if (slot == nullptr) {
      slot = std::make_shared<Group::Meeting>();
      slot->parts.resize(ranks);
      slot->rendezvous = std::make_shared<cuda_double::Rendezvous>();
      slot->rendezvous->missing = comm->size;
    }
    meeting = slot;
    meeting->parts[static_cast<size_t>(comm->rank)] = part;
  }
  meeting->rendezvous->aborted = &comm->group->aborted;
  meeting->rendezvous->keeps_alive = comm->group;
  return cuda_double::enqueue_meeting(
             stream, meeting->rendezvous, [=] { compute(kind, meeting->parts, type, op); }) ==
                 cudaSuccess
             ? ncclSuccess
             : ncclUnhandledCudaError;
}

std::mutex directory_mutex;
std::map<int64_t, std::weak_ptr<Group>> directory;
int64_t next_id = 1;

}  // namespace

#define DOUBLE_ENTRY                           \
  if (cuda_double::enters_failure(__func__)) { \
    return ncclInternalError;                  \
  }

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclInternalError ? "internal error (made to fail)" : "NCCL error of the double";
}
ncclResult_t ncclGetVersion(int* version) {
  DOUBLE_ENTRY
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  DOUBLE_ENTRY
  const std::lock_guard lock(directory_mutex);
  std::memcpy(id->internal, &next_id, sizeof(next_id));
  ++next_id;
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  DOUBLE_ENTRY
  int64_t number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  if (rank < 0 || rank >= nranks || number == 0 || config->blocking != 0) {
    return ncclInvalidArgument;
  }
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(directory_mutex);
    group = directory[number].lock();
    if (group == nullptr) {
      group = std::make_shared<Group>();
      group->members.resize(static_cast<size_t>(nranks));
      directory[number] = group;
    }
  }
  *comm = new ncclComm{group, rank, nranks, 0, 0};
  cuda_double::count_alive("NCCL communicators", 1);
  const std::lock_guard lock(group->mutex);
  group->members[static_cast<size_t>(rank)] = *comm;
  ++group->joined;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  DOUBLE_ENTRY
  if (comm == nullptr) {
    return ncclInvalidArgument;
  }
  const std::lock_guard lock(comm->group->mutex);
  *state = comm->group->aborted               ? ncclRemoteError
           : comm->group->joined < comm->size ? ncclInProgress
                                              : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  cuda_double::count_alive("NCCL communicators", -1);
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const std::lock_guard lock(comm->group->mutex);
    comm->group->aborted = true;
  }
  cuda_double::count_alive("NCCL communicators", -1);
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(
    ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
  DOUBLE_ENTRY
  if (config->blocking != 0) {
    return ncclInvalidArgument;
  }
  // The real call is collective too: it waits here for all ranks to say their color.
  const int64_t number = comm->splits++;
  {
    const std::lock_guard lock(comm->group->mutex);
    comm->group->splits[number].push_back({color, key, comm->rank});
  }
  for (int waited = 0; waited < 10000; ++waited) {
    std::vector<std::array<int, 3>> members;
    std::shared_ptr<Group> group;
    {
      const std::lock_guard lock(comm->group->mutex);
      if (comm->group->splits[number].size() == static_cast<size_t>(comm->size)) {
        for (const auto& member : comm->group->splits[number]) {
          if (member[0] == color) {
            members.push_back(member);
          }
        }
        auto& slot = comm->group->parts[{number, color}];
        if (slot == nullptr) {
          slot = std::make_shared<Group>();
          slot->members.resize(members.size());
          slot->joined = static_cast<int>(members.size());
        }
        group = slot;
      }
    }
    if (group != nullptr) {
      std::sort(members.begin(), members.end());
      const auto at = std::find_if(members.begin(), members.end(), [&](const auto& member) {
        return member[2] == comm->rank;
      });
      *part = new ncclComm{
          group, static_cast<int>(at - members.begin()), static_cast<int>(members.size()), 0, 0};
      cuda_double::count_alive("NCCL communicators", 1);
      return ncclSuccess;
    }
    cuda_double::sleep_ms(1);
  }
  return ncclInternalError;
}

ncclResult_t ncclAllReduce(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           ncclRedOp_t op,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, Kind::kAllReduce, {send, receive, count, 0, true}, type, op, stream);
}
ncclResult_t ncclReduceScatter(const void* send,
                               void* receive,
                               size_t count,
                               ncclDataType_t type,
                               ncclRedOp_t op,
                               ncclComm_t comm,
                               cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, Kind::kReduceScatter, {send, receive, count, 0, true}, type, op, stream);
}
ncclResult_t ncclReduce(const void* send,
                        void* receive,
                        size_t count,
                        ncclDataType_t type,
                        ncclRedOp_t op,
                        int root,
                        ncclComm_t comm,
                        cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, Kind::kReduce, {send, receive, count, root, true}, type, op, stream);
}
ncclResult_t ncclAllGather(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, Kind::kAllGather, {send, receive, count, 0, true}, type, ncclSum, stream);
}
ncclResult_t ncclBroadcast(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           int root,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, Kind::kBroadcast, {send, receive, count, root, true}, type, ncclSum, stream);
}

// Pairs of ranks meet one by one.
ncclResult_t ncclSend(const void* data,
                      size_t count,
                      ncclDataType_t type,
                      int peer,
                      ncclComm_t comm,
                      cudaStream_t stream) {
  DOUBLE_ENTRY
  return cuda_double::post_transfer(
             comm->group.get(), comm->rank, peer, data, count * bytes_of(type), stream) ==
                 cudaSuccess
             ? ncclSuccess
             : ncclInvalidArgument;
}
ncclResult_t ncclRecv(
    void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  DOUBLE_ENTRY
  return cuda_double::take_transfer(
             comm->group.get(), peer, comm->rank, data, count * bytes_of(type), stream) ==
                 cudaSuccess
             ? ncclSuccess
             : ncclInvalidArgument;
}
ncclResult_t ncclGroupStart() {
  DOUBLE_ENTRY
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  DOUBLE_ENTRY
  return ncclSuccess;
}

}  // extern "C"
