// The NCCL of the double: ranks are threads of one process, each with a device of its own. The work
// of a call runs when every rank's stream has reached its part, and then for all ranks at once; a
// send waits for its receive. What ranks call differently never ends, and neither does what waits
// for a rank that has aborted: as with the real library, only the own abort ends that, and waits
// for the whole device unless it is one of a group.
//
// Communicators are non-blocking: any call may be answered with "in progress", and is on its stream
// only when the communicator has said that it succeeded. Ranks are connected by the first call of a
// kind, or the first message from one to another: it is in progress until all have made it.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/cuda_memory.h"
#include "tests/cuda_double/cuda_streams.h"

using namespace cuda_double;

namespace {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kTransfer };

// What all ranks of a call must say alike.
struct Form {
  Kind kind = Kind::kAllReduce;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  bool operator==(const Form&) const = default;
};

struct Part {
  const void* send = nullptr;
  void* receive = nullptr;
};

struct Call : Meeting {
  Form form;
  std::vector<Part> parts;  // by rank; of a transfer: who sends, who receives
  size_t made = 0;          // of the parts: who has called
  bool connects = false;

  bool is_connected() const { return !connects || made == parts.size(); }
};

// What the ranks of one communicator share.
struct Group {
  int size = 0, joined = 0, finalized = 0;
  bool tells_of_aborts = false;  // as connections over a network do, others not
  bool aborted = false;
  std::set<int> devices;
  std::set<Kind> connected;                        // by a call of this kind
  std::map<int64_t, std::shared_ptr<Call>> calls;  // by number
  struct Transfers {
    std::vector<std::shared_ptr<Call>> calls;
    size_t sent = 0, received = 0;
  };
  std::map<std::pair<int, int>, Transfers> transfers;  // from, to
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0, device = 0;
  int64_t calls = 0;
  bool finalized = false;
  bool has_memory = false;  // of its connections
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::vector<std::shared_ptr<Call>> begun;
  // Answered with "in progress": not on the stream yet.
  std::optional<Op> pending;
  std::vector<std::shared_ptr<Call>> connecting;  // of those pending
  cudaStream_t pending_stream = nullptr;
};

namespace {

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
void compute(const Form& form, const std::vector<Part>& parts) {
  const Kind kind = form.kind;
  dispatch(form.type, [&](auto tag) {
    using T = decltype(tag);
    const size_t ranks = parts.size(), count = form.count;
    const auto send = [&](size_t r) { return static_cast<const T*>(parts[r].send); };
    const auto receive = [&](size_t r) { return static_cast<T*>(parts[r].receive); };
    if (kind == Kind::kTransfer) {
      std::memmove(parts[1].receive, parts[0].send, count * sizeof(T));
      return;
    }
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
      const size_t root = static_cast<size_t>(form.root);
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
        sums[i] = combine(sums[i], send(r)[i], form.op);
      }
    }
    for (size_t r = 0; r < ranks; ++r) {
      if (kind == Kind::kAllReduce) {
        std::copy(sums.begin(), sums.end(), receive(r));
      } else if (kind == Kind::kReduceScatter) {
        std::copy_n(sums.begin() + static_cast<std::ptrdiff_t>(r * count), count, receive(r));
      } else if (static_cast<int>(r) == form.root) {
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

bool on_device(const ncclComm& comm, const void* data, size_t bytes) {
  return bytes == 0 || owner_of(data, bytes) == comm.device;
}

// The calls between ncclGroupStart and ncclGroupEnd of a thread.
struct GroupOfCalls {
  int depth = 0;
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<std::shared_ptr<Call>> calls;
  std::set<int> aborted;  // devices
  bool valid = true;
};
thread_local GroupOfCalls open_group;

bool are_connected(const std::vector<std::shared_ptr<Call>>& calls) {
  return std::all_of(
      calls.begin(), calls.end(), [](const auto& call) { return call->is_connected(); });
}

ncclResult_t queue(ncclComm* comm, cudaStream_t stream, std::vector<std::shared_ptr<Call>> calls) {
  Op op;
  op.kind = Op::Kind::kMeet;
  op.meetings.assign(calls.begin(), calls.end());
  op.given_up = comm->aborted;
  if (generator()() % 4 == 0 || !are_connected(calls)) {
    comm->pending = std::move(op);
    comm->pending_stream = stream;
    comm->connecting = std::move(calls);
    return ncclInProgress;
  }
  find_stream(stream)->queue.push_back(std::move(op));
  return ncclSuccess;
}

// Whether the communicator takes calls, on this stream.
bool takes_calls(const ncclComm* comm, cudaStream_t stream) {
  return comm != nullptr && comm->group->joined == comm->group->size && !comm->finalized &&
         !comm->pending && !*comm->aborted && device_of(stream) == comm->device &&
         find_stream(stream)->capture == nullptr;
}

std::string last_error;

// Connections take memory of the device, of which no call of CUDA's runtime tells.
bool connect(ncclComm* comm) {
  const auto bytes = static_cast<std::ptrdiff_t>(options().communicator_bytes);
  if (!comm->has_memory && !take_bytes(comm->device, bytes, options().memory_bytes)) {
    last_error = "Failed to CUDA calloc " + std::to_string(bytes) + " bytes";
    return false;
  }
  comm->has_memory = true;
  return true;
}

ncclResult_t begin(ncclComm* comm, cudaStream_t stream, const std::shared_ptr<Call>& call) {
  comm->begun.push_back(call);
  ++call->made;
  if (open_group.depth == 0) {
    return queue(comm, stream, {call});
  }
  open_group.valid = open_group.valid && (open_group.comm == nullptr ||
                                          (open_group.comm == comm && open_group.stream == stream));
  open_group.comm = comm;
  open_group.stream = stream;
  open_group.calls.push_back(call);
  return ncclSuccess;
}

std::shared_ptr<Call> new_call(const Form& form, size_t parts) {
  auto call = std::make_shared<Call>();
  call->form = form;
  call->parts.resize(parts);
  call->missing = static_cast<int>(parts);
  call->work = [raw = call.get()] { compute(raw->form, raw->parts); };
  return call;
}

ncclResult_t meet(ncclComm* comm, const Form& form, const Part& part, cudaStream_t stream) {
  if (!takes_calls(comm, stream)) {
    return ncclInvalidUsage;
  }
  const size_t ranks = static_cast<size_t>(comm->group->size);
  const size_t bytes = form.count * bytes_of(form.type);
  const size_t sent = form.kind == Kind::kReduceScatter ? bytes * ranks : bytes;
  const size_t received = form.kind == Kind::kAllGather ? bytes * ranks : bytes;
  const bool sends = form.kind != Kind::kBroadcast || form.root == comm->rank;
  const bool receives = form.kind != Kind::kReduce || form.root == comm->rank;
  if ((sends && !on_device(*comm, part.send, sent)) ||
      (receives && !on_device(*comm, part.receive, received))) {
    return ncclInvalidArgument;
  }
  if (!connect(comm)) {
    return ncclUnhandledCudaError;
  }
  auto& call = comm->group->calls[comm->calls++];
  if (call == nullptr) {
    call = new_call(form, ranks);
    call->connects = comm->group->connected.insert(form.kind).second;
  }
  call->broken = call->broken || comm->group->aborted || !(call->form == form);
  call->parts[static_cast<size_t>(comm->rank)] = part;
  return begin(comm, stream, call);
}

// One side of the next transfer between two ranks.
ncclResult_t transfer(ncclComm* comm,
                      int from,
                      int to,
                      bool sends,
                      const Part& part,
                      size_t count,
                      ncclDataType_t type,
                      cudaStream_t stream) {
  if (!takes_calls(comm, stream) || from < 0 || to < 0 || from >= comm->group->size ||
      to >= comm->group->size || (from == to && open_group.depth == 0)) {
    return ncclInvalidUsage;
  }
  if (!on_device(*comm, sends ? part.send : part.receive, count * bytes_of(type))) {
    return ncclInvalidArgument;
  }
  if (!connect(comm)) {
    return ncclUnhandledCudaError;
  }
  Group::Transfers& lane = comm->group->transfers[{from, to}];
  const size_t number = sends ? lane.sent++ : lane.received++;
  const Form form{Kind::kTransfer, count, type, ncclSum, 0};
  if (number == lane.calls.size()) {
    lane.calls.push_back(new_call(form, 2));
    lane.calls.back()->connects = number == 0;
  }
  const auto call = lane.calls[number];
  call->broken = call->broken || comm->group->aborted || !(call->form == form);
  call->parts[sends ? 0 : 1] = part;
  return begin(comm, stream, call);
}

std::map<int64_t, std::weak_ptr<Group>> directory;
int64_t next_id = 1;

// What the communicator still has to do.
bool is_busy(ncclComm* comm) {
  const auto over = [](const std::shared_ptr<Call>& call) { return call->done; };
  comm->begun.erase(std::remove_if(comm->begun.begin(), comm->begun.end(), over),
                    comm->begun.end());
  return comm->pending || comm->group->joined < comm->group->size ||
         (comm->finalized && (!comm->begun.empty() || comm->group->finalized < comm->group->size));
}

void forget(ncclComm* comm) {
  count_alive("NCCL communicators", -1);
  if (comm->has_memory) {
    take_bytes(comm->device,
               -static_cast<std::ptrdiff_t>(options().communicator_bytes),
               options().memory_bytes);
  }
  delete comm;
}

}  // namespace

#define DOUBLE_ENTRY                                    \
  const Lock lock;                                      \
  if (enters_failure(__func__)) {                       \
    last_error = std::string(__func__) + " went wrong"; \
    return ncclInternalError;                           \
  }

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclInternalError ? "internal error (made to fail)" : "NCCL error of the double";
}
const char* ncclGetLastError(ncclComm_t) {
  return last_error.c_str();
}
ncclResult_t ncclGetVersion(int* version) {
  DOUBLE_ENTRY
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  DOUBLE_ENTRY
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, &next_id, sizeof(next_id));
  ++next_id;
  count_identifier();
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
  std::shared_ptr<Group> group = directory[number].lock();
  if (group == nullptr) {
    group = std::make_shared<Group>();
    group->size = nranks;
    directory[number] = group;
  }
  // Two ranks of one communicator on one device are refused.
  if (group->size != nranks || !group->devices.insert(current_device()).second) {
    return ncclInvalidUsage;
  }
  *comm = new ncclComm;
  (*comm)->group = group;
  (*comm)->rank = rank;
  (*comm)->device = current_device();
  count_alive("NCCL communicators", 1);
  ++group->joined;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  DOUBLE_ENTRY
  if (comm == nullptr) {
    return ncclInvalidArgument;
  }
  if (comm->group->aborted && comm->group->tells_of_aborts) {
    *state = ncclRemoteError;
    return ncclSuccess;
  }
  if (comm->pending && are_connected(comm->connecting) && generator()() % 2 == 0) {
    if (const auto stream = find_stream(comm->pending_stream)) {
      stream->queue.push_back(std::move(*comm->pending));
    }
    comm->pending.reset();
  }
  run_some();
  *state = is_busy(comm) ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
// Collective, as the end of what was begun is.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  DOUBLE_ENTRY
  if (comm == nullptr || comm->finalized) {
    return ncclInvalidArgument;
  }
  comm->finalized = true;
  ++comm->group->finalized;
  return ncclInProgress;
}
// Waits for all ranks when they have not finalized: for ever, for one that has aborted.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock;
  if (!comm->finalized) {
    comm->finalized = true;
    ++comm->group->finalized;
  }
  for (int waited = 0; is_busy(comm);) {
    wait_for_others("ncclCommDestroy", waited);
  }
  forget(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Lock lock;
  if (!comm->group->aborted) {
    comm->group->aborted = true;
    comm->group->tells_of_aborts = generator()() % 2 == 0;
  }
  *comm->aborted = true;
  for (const auto& call : comm->begun) {
    call->broken = !call->done;
  }
  const int device = comm->device;
  forget(comm);
  if (open_group.depth == 0) {
    drain(device);  // memory is freed
  } else {
    open_group.aborted.insert(device);
  }
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           ncclRedOp_t op,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, {Kind::kAllReduce, count, type, op, 0}, {send, receive}, stream);
}
ncclResult_t ncclReduceScatter(const void* send,
                               void* receive,
                               size_t count,
                               ncclDataType_t type,
                               ncclRedOp_t op,
                               ncclComm_t comm,
                               cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, {Kind::kReduceScatter, count, type, op, 0}, {send, receive}, stream);
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
  return meet(comm, {Kind::kReduce, count, type, op, root}, {send, receive}, stream);
}
ncclResult_t ncclAllGather(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, {Kind::kAllGather, count, type, ncclSum, 0}, {send, receive}, stream);
}
ncclResult_t ncclBroadcast(const void* send,
                           void* receive,
                           size_t count,
                           ncclDataType_t type,
                           int root,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  DOUBLE_ENTRY
  return meet(comm, {Kind::kBroadcast, count, type, ncclSum, root}, {send, receive}, stream);
}

ncclResult_t ncclSend(const void* data,
                      size_t count,
                      ncclDataType_t type,
                      int peer,
                      ncclComm_t comm,
                      cudaStream_t stream) {
  DOUBLE_ENTRY
  return transfer(
      comm, comm == nullptr ? -1 : comm->rank, peer, true, {data, nullptr}, count, type, stream);
}
ncclResult_t ncclRecv(
    void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  DOUBLE_ENTRY
  return transfer(
      comm, peer, comm == nullptr ? -1 : comm->rank, false, {nullptr, data}, count, type, stream);
}
ncclResult_t ncclGroupStart() {
  DOUBLE_ENTRY
  ++open_group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  DOUBLE_ENTRY
  if (open_group.depth == 0) {
    return ncclInvalidUsage;
  }
  if (--open_group.depth > 0) {
    return ncclSuccess;
  }
  const GroupOfCalls group = std::move(open_group);
  open_group = {};
  for (const int device : group.aborted) {
    drain(device);
  }
  if (group.calls.empty()) {
    return ncclSuccess;
  }
  return group.valid ? queue(group.comm, group.stream, group.calls) : ncclInvalidUsage;
}

}  // extern "C"
