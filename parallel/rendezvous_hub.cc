// All state belongs to the hub's thread, which waits for messages of any rank and looks at its
// deadlines ten times a second. Only the number of ranks that are still there is shared.
#include "parallel/rendezvous_hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "graph/base/log.h"
#include "parallel/rendezvous_message.h"
#include "parallel/silence.h"

namespace trainrt {

namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kTick{100};
constexpr milliseconds kSendTimeout{1000};

double seconds(SteadyClock::duration time) {
  return static_cast<double>(std::chrono::duration_cast<milliseconds>(time).count()) / 1000;
}

// One connection; a rank from its hello on.
struct Peer {
  Socket socket;
  MessageReader reader;
  int rank = -1;
  std::string process;  // "process 17 on host a"
  std::string host;
  std::string address;  // how it is reached
  RankActivity activity;
  Silence silence;                // since it last said what it does
  SteadyClock::time_point since;  // and since when it does that
  bool left = false;
};

// Blobs of one exchange.
struct Round {
  SteadyClock::time_point start;
  std::map<int, std::string> blobs;  // by rank
};

std::string join_ranks(const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += concat(text.empty() ? "" : ", ", rank);
  }
  return text.empty() ? "none" : text;
}

}  // namespace

struct RendezvousHub::Impl {
  RankPlace place;
  milliseconds deadline;
  Socket listener;
  int wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  SteadyClock::time_point start = SteadyClock::now();
  std::list<Peer> peers;  // connections; an ended one is removed
  bool complete = false;  // all ranks have come
  std::optional<Failure> failure;
  std::map<std::string, Round> rounds;
  SteadyClock::time_point told_of_life;
  std::atomic<bool> stopping = false;
  std::mutex mutex;
  std::condition_variable changed;
  size_t present = 0;           // ranks connected, but for rank 0 and the one that failed
  int num_callers = 0;          // processes that said they are of this job
  bool awaits_callers = false;  // it failed before all had come: who comes is still to be told
  std::thread thread;

  void run();
  void handle(Peer& peer, const Json& message);
  void welcome(Peer& peer, const Json& hello);
  void welcome_all();
  std::optional<std::string> objection(const Json& hello) const;
  void lost(const Peer& peer, const std::string& why);
  void fail(const Failure& why);
  void set_activity(Peer& peer, const RankActivity& activity);
  void check_deadlines();
  void check_silence();
  void tell_of_life();
  Failure verdict(int suspect, const std::string& complaint);
  Peer* find(int rank);
  std::string name(int rank);
  std::set<int> arrived() const;
  std::set<int> missing(const std::set<int>& there) const;
  void count_present();
  void send(const Peer& peer, const Json& message) const {
    peer.socket.send_message(message_text(message), kSendTimeout);
  }
};

Peer* RendezvousHub::Impl::find(int rank) {
  for (Peer& peer : peers) {
    if (peer.rank == rank) {
      return &peer;
    }
  }
  return nullptr;
}

std::string RendezvousHub::Impl::name(int rank) {
  const Peer* peer = find(rank);
  return peer == nullptr ? concat("rank ", rank) : concat("rank ", rank, " (", peer->process, ")");
}

std::set<int> RendezvousHub::Impl::arrived() const {
  std::set<int> ranks;
  for (const Peer& peer : peers) {
    if (peer.rank >= 0) {
      ranks.insert(peer.rank);
    }
  }
  return ranks;
}

std::set<int> RendezvousHub::Impl::missing(const std::set<int>& there) const {
  std::set<int> ranks;
  for (int rank = 0; rank < place.world_size; ++rank) {
    if (there.count(rank) == 0) {
      ranks.insert(rank);
    }
  }
  return ranks;
}

void RendezvousHub::Impl::count_present() {
  const std::lock_guard lock(mutex);
  present = 0;
  for (const Peer& peer : peers) {
    const bool failed = failure && failure->rank == peer.rank;  // it knows, or cannot leave
    present += peer.rank > 0 && !peer.left && !failed ? 1 : 0;
  }
  changed.notify_all();
}

void RendezvousHub::Impl::fail(const Failure& why) {
  if (failure) {
    return;
  }
  failure = why;
  if (!complete) {
    const std::lock_guard lock(mutex);
    awaits_callers = true;
  }
  for (const Peer& peer : peers) {
    if (peer.rank >= 0) {
      send(peer, failure_message(why));
    }
  }
  count_present();
}

// Why this process cannot be the rank that it says, or nothing.
std::optional<std::string> RendezvousHub::Impl::objection(const Json& hello) const {
  const int rank = hello.at("rank"), world_size = hello.at("world_size");
  const std::string version = hello.at("version");
  if (world_size != place.world_size) {
    return concat("rank ",
                  rank,
                  " was started for ",
                  world_size,
                  " ranks, rank 0 for ",
                  place.world_size,
                  ": start all with one world size");
  }
  if (rank < 0 || rank >= world_size) {
    return concat("a process says it is rank ", rank, " of ", world_size);
  }
  if (version != place.version) {
    return concat("rank ",
                  rank,
                  " runs version ",
                  version,
                  ", rank 0 version ",
                  place.version,
                  ": all ranks need one version");
  }
  return std::nullopt;
}

void RendezvousHub::Impl::welcome(Peer& peer, const Json& hello) {
  const std::string process = concat(
      "process ", hello.at("pid").get<int64_t>(), " on ", hello.at("host").get<std::string>());
  const int rank = hello.at("rank");
  const int64_t generation = hello.at("generation");
  const auto refuse = [&](bool try_again, const std::string& why) {
    send(peer, {{"type", "refused"}, {"again", try_again}, {"message", why}});
    peer.left = true;  // the connection is dropped
  };
  if (hello.at("job") != place.job) {
    refuse(true,
           concat("rank 0 there belongs to job '",
                  place.job,
                  "', not to '",
                  hello.at("job").get<std::string>(),
                  "'"));
    return;
  }
  if (generation < place.generation) {
    refuse(false,
           concat("the job is at generation ",
                  place.generation,
                  ", this process is of generation ",
                  generation,
                  " and has to end"));
    return;
  }
  if (generation > place.generation) {
    refuse(true, concat("rank 0 there is still of generation ", place.generation));
    fail({rank, ErrorCode::kCommunication, concat("generation ", generation, " of the job began")});
    const std::lock_guard lock(mutex);
    awaits_callers = false;  // they are to call at the new rank 0
    changed.notify_all();
    return;
  }
  {
    const std::lock_guard lock(mutex);
    ++num_callers;
  }
  changed.notify_all();
  if (failure) {
    // Of a job that never began everybody is told why; one that ran is over, and this process may
    // be part of its next start.
    complete ? refuse(true, "the job there has failed: " + failure->message)
             : send(peer, failure_message(*failure));
    return;
  }
  if (const std::optional<std::string> problem = objection(hello)) {
    if (complete) {
      refuse(false, *problem);
      return;
    }
    fail({rank, ErrorCode::kInvalidArgument, *problem});
    send(peer, failure_message(*failure));
    return;
  }
  if (const Peer* other = find(rank)) {
    const std::string twice = concat("two processes say they are rank ",
                                     rank,
                                     ": ",
                                     other->process,
                                     " and ",
                                     process,
                                     "; each rank is started once");
    if (complete) {
      refuse(true, twice);
      return;
    }
    fail({rank, ErrorCode::kInvalidArgument, twice});
    send(peer, failure_message(*failure));
    return;
  }
  peer.rank = rank;
  peer.process = process;
  peer.host = hello.at("host_id");
  peer.silence.broken();
  peer.since = SteadyClock::now();
  count_present();
  // Before any rank goes on, and may die, this one knows that it was let in.
  send(peer, {{"type", "noted"}});
  if (arrived().size() == static_cast<size_t>(place.world_size)) {
    complete = true;
    welcome_all();
  }
}

// Ranks on rank 0's host may have come through the loopback interface, which others cannot reach:
// they get the address at which the others found rank 0.
void RendezvousHub::Impl::welcome_all() {
  std::string common = "127.0.0.1";
  for (const Peer& peer : peers) {
    const std::string address = peer.socket.local_address();
    if (peer.rank > 0 && !is_loopback(address)) {
      common = address;
    }
  }
  Json addresses = Json::array(), hosts = Json::array();
  for (int rank = 0; rank < place.world_size; ++rank) {
    Peer& peer = *find(rank);
    peer.address = peer.socket.peer_address();
    if (is_loopback(peer.address)) {
      peer.address = common;
    }
    addresses.push_back(peer.address);
    hosts.push_back(peer.host);
  }
  for (const Peer& peer : peers) {
    if (peer.rank >= 0) {
      send(peer, {{"type", "welcome"}, {"addresses", addresses}, {"hosts", hosts}});
    }
  }
}

// Follows who waits for whom from `suspect` to a rank that waits for nobody.
Failure RendezvousHub::Impl::verdict(int suspect, const std::string& complaint) {
  const auto now = SteadyClock::now();
  std::set<int> seen;
  int rank = suspect;
  Failure result;
  for (;;) {
    Peer* peer = find(rank);
    result.rank = rank;
    if (peer == nullptr || peer->left) {
      result.message = concat(complaint, ": rank ", rank, " has ended");
      return result;
    }
    if (const auto silence = peer->silence.look(); silence > 4 * activity_interval(deadline)) {
      result.message = concat(complaint,
                              ": ",
                              name(rank),
                              " ",
                              silence_text(silence),
                              "; it was last ",
                              peer->activity.doing);
      return result;
    }
    if (peer->activity.waits_for < 0) {
      result.message = concat(complaint,
                              ": ",
                              name(rank),
                              " is alive and has not come; it has been ",
                              peer->activity.doing,
                              " for ",
                              seconds(now - peer->since),
                              " s");
      return result;
    }
    if (!seen.insert(rank).second) {
      result.rank = suspect;
      result.message = concat(complaint,
                              ": ranks ",
                              join_ranks(seen),
                              " wait for each other; ",
                              name(rank),
                              " is ",
                              peer->activity.doing);
      return result;
    }
    rank = peer->activity.waits_for;
  }
}

void RendezvousHub::Impl::lost(const Peer& peer, const std::string& why) {
  if (peer.rank < 0 || peer.left) {
    return;
  }
  fail({peer.rank,
        ErrorCode::kCommunication,
        concat("rank ",
               peer.rank,
               " (",
               peer.process,
               ") died or is out of reach: ",
               why,
               "; it was last ",
               peer.activity.doing)});
}

void RendezvousHub::Impl::handle(Peer& peer, const Json& message) {
  const std::string type = message.at("type");
  if (type == "hello") {
    welcome(peer, message);
    return;
  }
  if (peer.rank < 0) {
    peer.left = true;
    return;
  }
  peer.silence.broken();
  if (type == "activity") {
    set_activity(peer, {message.at("doing"), message.at("waits_for")});
  } else if (type == "exchange") {
    const std::string what = message.at("what");
    set_activity(peer, {doing_exchange(what), -1});
    Round& round = rounds[what];
    if (round.blobs.empty()) {
      round.start = SteadyClock::now();
    }
    round.blobs[peer.rank] = message.at("blob");
    if (round.blobs.size() == static_cast<size_t>(place.world_size)) {
      Json blobs = Json::array();
      for (const auto& [rank, blob] : round.blobs) {
        blobs.push_back(blob);
      }
      for (Peer& other : peers) {
        if (other.rank >= 0) {
          send(other, {{"type", "exchanged"}, {"what", what}, {"blobs", blobs}});
          set_activity(other, {doing_after_exchange(what), -1});
        }
      }
      rounds.erase(what);
    }
  } else if (type == "failed") {
    fail(failure_from_message(message));
  } else if (type == "stalled") {
    if (!failure) {
      fail(verdict(message.at("peer"), message.at("complaint")));
    }
  } else if (type == "bye") {
    peer.left = true;
    count_present();
  }
}

void RendezvousHub::Impl::set_activity(Peer& peer, const RankActivity& activity) {
  if (activity.doing != peer.activity.doing) {
    peer.since = SteadyClock::now();
  }
  peer.activity = activity;
}

// Rank 0 itself is as alive as this thread.
void RendezvousHub::Impl::check_silence() {
  for (Peer& peer : peers) {
    const auto silence = peer.silence.look();
    if (peer.rank <= 0 || peer.left || silence <= longest_silence(deadline)) {
      continue;
    }
    fail({peer.rank,
          ErrorCode::kCommunication,
          concat(
              name(peer.rank), " ", silence_text(silence), "; it was last ", peer.activity.doing)});
  }
}

// To those that have been heard lately: nothing piles up where nobody reads.
void RendezvousHub::Impl::tell_of_life() {
  if (!complete || SteadyClock::now() < told_of_life + activity_interval(deadline)) {
    return;
  }
  told_of_life = SteadyClock::now();
  const Peer* own = find(0);
  const std::string doing = own == nullptr ? "leaving" : own->activity.doing;
  for (Peer& peer : peers) {
    if (peer.rank >= 0 && !peer.left && peer.silence.look() < 4 * activity_interval(deadline)) {
      send(peer, {{"type", "alive"}, {"doing", doing}});
    }
  }
}

void RendezvousHub::Impl::check_deadlines() {
  const auto now = SteadyClock::now();
  if (failure) {
    return;
  }
  if (!complete && now - start > deadline) {
    const std::set<int> there = arrived(), absent = missing(there);
    fail({absent.empty() ? -1 : *absent.begin(),
          ErrorCode::kCommunication,
          concat(absent.size() > 1 ? "ranks " : "rank ",
                 join_ranks(absent),
                 " of ",
                 place.world_size,
                 absent.size() > 1 ? " have" : " has",
                 " not come within ",
                 seconds(deadline),
                 " s to rank 0 at ",
                 place.host,
                 ":",
                 listener.local_port(),
                 " (arrived: ",
                 join_ranks(there),
                 "); were all ranks started, and can they reach that address?")});
  }
  for (const auto& [what, round] : rounds) {
    if (now - round.start > deadline) {
      std::set<int> there;
      for (const auto& [rank, blob] : round.blobs) {
        there.insert(rank);
      }
      const int absent = *missing(there).begin();
      fail(verdict(absent, concat(what, " waited ", seconds(deadline), " s for rank ", absent)));
      return;
    }
  }
}

void RendezvousHub::Impl::run() {
  while (!stopping) {
    std::vector<pollfd> wanted = {{wake, POLLIN, 0}, {listener.fd(), POLLIN, 0}};
    for (const Peer& peer : peers) {
      wanted.push_back({peer.socket.fd(), POLLIN, 0});
    }
    ::poll(wanted.data(), wanted.size(), static_cast<int>(kTick.count()));
    size_t i = 2;
    for (auto peer = peers.begin(); peer != peers.end() && i < wanted.size(); ++i) {
      std::string why;
      bool open = true;
      if (wanted[i].revents != 0) {
        open = peer->reader.read(peer->socket, why) == MessageReader::Status::kOpen;
        try {
          while (const std::optional<std::string> text = peer->reader.next()) {
            handle(*peer, Json::parse(*text));
          }
        } catch (const std::exception& error) {
          log_warning("rank 0 drops a connection of ",
                      peer->socket.peer_address(),
                      " that does not speak as a rank: ",
                      error.what());
          open = false;
          why = "it sent what is no message";
        }
      }
      if (!open) {
        lost(*peer, why);
      }
      peer = open && !(peer->left && peer->rank < 0) ? std::next(peer) : peers.erase(peer);
      if (!open) {
        count_present();
      }
    }
    while (std::optional<Socket> socket = listener.accepted()) {
      Peer& peer = peers.emplace_back();
      peer.socket = std::move(*socket);
      peer.socket.watch_peer_host(kHostTimeout);
    }
    check_deadlines();
    check_silence();
    tell_of_life();
  }
}

RendezvousHub::RendezvousHub(const RankPlace& place, milliseconds deadline)
    : impl_(std::make_unique<Impl>()) {
  impl_->place = place;
  impl_->deadline = deadline;
  impl_->listener =
      place.listening_fd >= 0 ? Socket(place.listening_fd) : Socket::listening(place.port);
  impl_->thread = std::thread([this] { impl_->run(); });
}

RendezvousHub::~RendezvousHub() {
  impl_->stopping = true;
  const uint64_t one = 1;
  (void)!::write(impl_->wake, &one, sizeof(one));
  impl_->thread.join();
  ::close(impl_->wake);
}

int RendezvousHub::port() const {
  return impl_->listener.local_port();
}

void RendezvousHub::wait_until_told() {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait_until(lock, impl_->start + impl_->deadline, [&] {
    return !impl_->awaits_callers || impl_->num_callers >= impl_->place.world_size;
  });
}

void RendezvousHub::wait_until_left(milliseconds timeout) {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait_for(lock, timeout, [&] { return impl_->present == 0; });
}

}  // namespace trainrt
