// What communicators between processes have in common: who is in the group, splitting, failures,
// the rules of messages. How bytes move differs by what connects the members (gloo_, shared_).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/gloo_mesh.h"

namespace trainrt {

// A group of a job's ranks as this process sees it.
struct ProcessGroup {
  std::shared_ptr<GlooMesh> mesh;
  std::shared_ptr<int64_t> next_number;  // of this process's next group
  std::vector<int> members;              // world ranks
  int rank = 0;                          // of this process in `members`
  int64_t number = 0;                    // equal on all members, unlike any other's of each
  bool may_share_memory = true;
};

// The communicator of a group: through shared memory when all members can, else over Gloo.
// Collective over the group.
std::unique_ptr<Communicator> make_process_communicator(ProcessGroup group);

enum class Call : int32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kBarrier
};

// What a rank calls: the first thing that it tells the others, so that a difference is found before
// any data moves.
struct CallHeader {
  int64_t sequence = 0;
  int64_t count = 0;  // of the whole call
  Call call = Call::kBarrier;
  int32_t dtype = 0;
  int32_t reduction = 0;
  int32_t detail = 0;  // root of a broadcast; tensors of a bucket
};

class ProcessCommunicator : public Communicator {
 public:
  explicit ProcessCommunicator(ProcessGroup group);

  int rank() const override { return group_.rank; }
  int world_size() const override { return static_cast<int>(group_.members.size()); }
  void send(const void* data, int64_t bytes, int peer, int tag) override;
  void recv(void* data, int64_t bytes, int peer, int tag) override;
  std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) noexcept override;
  void throw_if_failed() const override;

  std::string failure() const override;

 protected:
  // A message to another member, and the next one of `tag` from it, of which at most `bytes` are
  // copied: its size.
  virtual void post(const void* data, int64_t bytes, int peer, int tag) = 0;
  virtual int64_t take(void* data, int64_t bytes, int peer, int tag) = 0;

  GlooMesh& mesh() const { return *group_.mesh; }
  int member(size_t r) const { return group_.members[r]; }
  size_t self() const { return static_cast<size_t>(group_.rank); }
  size_t size() const { return group_.members.size(); }
  int64_t number() const { return group_.number; }
  SteadyClock::time_point deadline() const;

  // The call that begins now; end() counts it.
  CallHeader begin(Call call, int64_t count, DType dtype, size_t detail = 0);
  void end();
  const std::string& doing() const { return doing_; }

  // Throw and tell all when rank r calls something else, or sends another number of elements than
  // this rank expects of it.
  void require_same_call(size_t r, const CallHeader& own, const CallHeader& other);
  void require_count(size_t r, int64_t sent, int64_t expected);

 private:
  [[noreturn]] void fail(const std::string& message);
  int world_rank() const { return member(self()); }
  std::string message_string(const char* what, int64_t bytes, int peer, int tag) const;

  ProcessGroup group_;
  std::string name_;  // "ranks 0, 1" or "group 2 (ranks 1, 3)"
  int64_t sequence_ = 0;
  std::string doing_;
  std::map<int, std::deque<std::vector<std::byte>>> to_self_;  // by tag
};

// Sums of counts, and where each segment begins.
int64_t total(const std::vector<int64_t>& counts);
std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts);
void copy_bytes(void* to, const void* from, int64_t bytes);
// `count` elements in one segment per rank, cut at cache lines.
std::vector<int64_t> even_segments(int64_t count, int num_ranks);

}  // namespace trainrt
