// A rank's side: a thread reads what rank 0 says and, at intervals, tells what this rank is doing.
#include "parallel/rendezvous.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "parallel/rendezvous_hub.h"
#include "parallel/rendezvous_message.h"
#include "parallel/silence.h"

namespace trainrt {

namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kSendTimeout{1000};
constexpr milliseconds kRetry{100};
// Rank 0 tells first that somebody is missing; only then do the others speak for themselves.
constexpr milliseconds kSlack{1000};

double seconds(milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

// Containers, and the networks of tests, are hosts of their own though they may bear one name.
std::string network_namespace() {
  char text[64] = "";
  return ::readlink("/proc/self/ns/net", text, sizeof(text) - 1) > 0 ? text : "";
}

[[noreturn]] void throw_failure(const Failure& failure) {
  throw Error(failure.code, failure.message);
}

// What is to be said when a message does not come by its time.
constexpr const char* kNoAnswer =
    "the connection was taken, but there is no answer: rank 0 is stopped or hangs, or another "
    "program listens there";

// The next message that has come. Throws kCommunication where it is none of ours.
std::optional<Json> take_message(MessageReader& reader, const std::string& where) {
  try {
    const std::optional<std::string> text = reader.next();
    return text ? std::optional<Json>(Json::parse(*text)) : std::nullopt;
  } catch (const std::exception&) {
    TRAINRT_FAIL(kCommunication,
                 "what answers at ",
                 where,
                 " is no rank 0 of this program, but another program, which has that port; start "
                 "all ranks with another port, or with the address of rank 0's host");
  }
}

// The next message, or nothing when there is none before `end` or the connection ends (`why`).
std::optional<Json> next_message(const Socket& socket,
                                 MessageReader& reader,
                                 const std::string& where,
                                 SteadyClock::time_point end,
                                 std::string& why) {
  for (;;) {
    if (std::optional<Json> message = take_message(reader, where)) {
      return message;
    }
    const auto left = std::chrono::ceil<milliseconds>(end - SteadyClock::now());
    pollfd wanted{socket.fd(), POLLIN, 0};
    if (left.count() <= 0 || ::poll(&wanted, 1, static_cast<int>(left.count())) == 0) {
      why = kNoAnswer;
      return std::nullopt;
    }
    if (reader.read(socket, why) == MessageReader::Status::kClosed) {
      return take_message(reader, where);
    }
  }
}

}  // namespace

struct Rendezvous::Impl {
  RankPlace place;
  milliseconds deadline;
  std::unique_ptr<RendezvousHub> hub;  // on rank 0; outlives the connection to it
  Socket socket;
  MessageReader reader;
  std::string where;  // host:port of rank 0
  std::string address;
  std::vector<std::string> hosts;  // by rank
  int wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::thread thread;

  std::mutex send_mutex;
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  RankActivity activity;
  std::map<std::string, std::vector<std::string>> exchanged;
  std::optional<Failure> failure;
  bool left = false;
  std::string rank_zero_doing = "starting";  // of the thread
  std::mutex callback_mutex;  // held while it is called, so that who takes it back may go
  std::function<void()> callback;
  std::atomic<bool> stopping = false;

  Impl(const RankPlace& own, milliseconds longest) : place(own), deadline(longest) {
    if (place.rank == 0) {
      hub = std::make_unique<RendezvousHub>(place, deadline);
      place.port = hub->port();
    }
    where = concat(place.host, ":", place.port);
  }
  ~Impl() { ::close(wake); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  void begin(const std::string& doing, int waits_for);
  void tell_activity();
  bool call(SteadyClock::time_point end, std::string& why);
  std::optional<std::string> try_to_join(SteadyClock::time_point end);
  std::optional<Json> await_welcome(SteadyClock::time_point end, std::string& why);
  std::string lost_rank_zero(const std::string& why) const {
    return concat("rank 0 (at ", where, ") died or is out of reach: ", why);
  }
  void run();
  void receive(const Json& message);
  void set_failure(const Failure& why);
  bool send(const Json& message) {
    const std::lock_guard lock(send_mutex);
    return socket.send_message(message_text(message), kSendTimeout);
  }
};

void Rendezvous::Impl::begin(const std::string& doing, int waits_for) {
  bool stop = false;
  {
    const std::lock_guard lock(mutex);
    activity = {doing, waits_for};
    stop = !place.stop_at.empty() && doing.rfind(place.stop_at, 0) == 0;
    if (stop) {
      place.stop_at.clear();
    }
  }
  if (stop) {
    ::raise(SIGSTOP);
  }
}

void Rendezvous::Impl::tell_activity() {
  RankActivity current;
  {
    const std::lock_guard lock(mutex);
    current = activity;
  }
  send({{"type", "activity"}, {"doing", current.doing}, {"waits_for", current.waits_for}});
}

// Gives signs of life until then, so that a rank that stops while it waits is found in time.
std::optional<Json> Rendezvous::Impl::await_welcome(SteadyClock::time_point end, std::string& why) {
  for (;;) {
    tell_activity();
    const auto slice = std::min(end, SteadyClock::now() + activity_interval(deadline));
    std::optional<Json> answer = next_message(socket, reader, where, slice, why);
    if (answer || why != kNoAnswer || slice == end) {
      return answer;
    }
  }
}

// Connects to rank 0 and says who this is.
bool Rendezvous::Impl::call(SteadyClock::time_point end, std::string& why) {
  const auto remaining = std::chrono::ceil<milliseconds>(end - SteadyClock::now());
  const std::string host = hub ? "127.0.0.1" : place.host;
  std::optional<Socket> connected =
      Socket::connected(host, place.port, std::max(remaining, milliseconds(1)), why);
  if (!connected) {
    return false;
  }
  socket = std::move(*connected);
  socket.watch_peer_host(kHostTimeout);
  reader = MessageReader();
  send({{"type", "hello"},
        {"rank", place.rank},
        {"world_size", place.world_size},
        {"job", place.job},
        {"generation", place.generation},
        {"version", place.version},
        {"host", host_name()},
        {"host_id", host_name() + " " + network_namespace()},
        {"pid", ::getpid()}});
  return true;
}

// One attempt; why it failed, if another may succeed. Throws when none can.
std::optional<std::string> Rendezvous::Impl::try_to_join(SteadyClock::time_point end) {
  begin("reaching rank 0", -1);
  std::string why;
  if (!call(end, why)) {
    return why;
  }
  begin("waiting for all ranks to come", -1);
  // At once, where rank 0 is there: it is nobody else's notice that would come late.
  std::optional<Json> answer = next_message(socket, reader, where, end, why);
  if (answer && answer->at("type") == "noted") {
    // From here on a connection that ends is the end of this job's rank 0, not of an earlier job's.
    answer = await_welcome(end + kSlack, why);
    TRAINRT_REQUIRE(answer || SteadyClock::now() >= end, kCommunication, lost_rank_zero(why));
  }
  if (!answer) {
    return why;
  }
  const std::string type = answer->at("type");
  if (type == "failed") {
    throw_failure(failure_from_message(*answer));
  }
  if (type == "refused") {
    const std::string message = answer->at("message");
    TRAINRT_REQUIRE(answer->at("again").get<bool>(), kInvalidArgument, message);
    return message;
  }
  const size_t self = static_cast<size_t>(place.rank);
  address = answer->at("addresses").at(self);
  hosts = answer->at("hosts").get<std::vector<std::string>>();
  return std::nullopt;
}

void Rendezvous::Impl::set_failure(const Failure& why) {
  {
    const std::lock_guard lock(mutex);
    if (failure || left) {
      return;
    }
    failure = why;
  }
  changed.notify_all();
  const std::lock_guard lock(callback_mutex);
  if (callback) {
    callback();
  }
}

void Rendezvous::Impl::receive(const Json& message) {
  const std::string type = message.at("type");
  if (type == "failed") {
    set_failure(failure_from_message(message));
  } else if (type == "alive") {
    rank_zero_doing = message.at("doing");
  } else if (type == "exchanged") {
    const std::lock_guard lock(mutex);
    exchanged[message.at("what")] = message.at("blobs").get<std::vector<std::string>>();
    changed.notify_all();
  }
}

void Rendezvous::Impl::run() {
  const milliseconds interval = activity_interval(deadline);
  auto due = SteadyClock::now();
  Silence silence;  // of rank 0
  bool open = true;
  std::string why;
  const auto take_messages = [&] {
    try {
      while (const std::optional<std::string> text = reader.next()) {
        receive(Json::parse(*text));
      }
    } catch (const std::exception& error) {
      open = false;
      why = error.what();
    }
  };
  take_messages();  // what came in one piece with the answer to joining
  while (!stopping) {
    const auto now = SteadyClock::now();
    if (open && now >= due) {
      tell_activity();
      due = now + interval;
    }
    pollfd wanted[2] = {{wake, POLLIN, 0}, {open ? socket.fd() : -1, POLLIN, 0}};
    ::poll(wanted, 2, static_cast<int>(interval.count() / 2));
    if (wanted[1].revents != 0) {
      open = reader.read(socket, why) == MessageReader::Status::kOpen;
      silence.broken();
      take_messages();
      if (!open) {
        set_failure({0, ErrorCode::kCommunication, lost_rank_zero(why)});
      }
    }
    if (const auto length = silence.look(); open && length > longest_silence(deadline)) {
      set_failure({0,
                   ErrorCode::kCommunication,
                   concat("rank 0 (at ",
                          where,
                          ") ",
                          silence_text(length),
                          "; it was last ",
                          rank_zero_doing)});
    }
  }
}

std::unique_ptr<Rendezvous> Rendezvous::join(const RankPlace& place, milliseconds deadline) {
  auto impl = std::make_unique<Impl>(place, deadline);
  const auto end = SteadyClock::now() + deadline;
  const auto try_to_join = [&] {
    try {
      return impl->try_to_join(end);
    } catch (const Error&) {
      if (impl->hub) {
        impl->hub->wait_until_told();
      }
      throw;
    }
  };
  while (const std::optional<std::string> why = try_to_join()) {
    TRAINRT_REQUIRE(SteadyClock::now() + kRetry < end,
                    kCommunication,
                    "rank ",
                    place.rank,
                    " could not join rank 0 at ",
                    impl->where,
                    " within ",
                    seconds(deadline),
                    " s: ",
                    *why,
                    "; is rank 0 running, and can this host reach that address?");
    std::this_thread::sleep_for(kRetry);
  }
  impl->begin("starting", -1);
  impl->thread = std::thread([raw = impl.get()] { raw->run(); });
  return std::unique_ptr<Rendezvous>(new Rendezvous(std::move(impl)));
}

void Rendezvous::decline(const RankPlace& place,
                         const Failure& failure,
                         milliseconds timeout) noexcept {
  try {
    Impl impl(place, timeout);
    const auto end = SteadyClock::now() + timeout;
    std::string why, type;
    const auto next_type = [&] {
      const std::optional<Json> answer =
          next_message(impl.socket, impl.reader, impl.where, end, why);
      type = answer ? answer->at("type").get<std::string>() : "";
    };
    for (; type.empty() && SteadyClock::now() < end; std::this_thread::sleep_for(kRetry)) {
      if (!impl.call(end, why)) {
        continue;
      }
      next_type();
      if (type == "noted") {
        impl.send(failure_message(failure));
      }
      while (type != "failed" && type != "refused" && !type.empty()) {
        next_type();
      }
    }
    if (impl.hub) {
      impl.hub->wait_until_told();
    }
  } catch (...) {  // the others wait to their deadline
  }
}

Rendezvous::Rendezvous(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Rendezvous::~Rendezvous() {
  impl_->stopping = true;
  const uint64_t one = 1;
  (void)!::write(impl_->wake, &one, sizeof(one));
  impl_->thread.join();
}

int Rendezvous::rank() const {
  return impl_->place.rank;
}

int Rendezvous::world_size() const {
  return impl_->place.world_size;
}

milliseconds Rendezvous::deadline() const {
  return impl_->deadline;
}

const std::string& Rendezvous::address() const {
  return impl_->address;
}

const std::string& Rendezvous::host_of(int rank) const {
  return impl_->hosts.at(static_cast<size_t>(rank));
}

std::vector<std::string> Rendezvous::exchange(const std::string& what, const std::string& mine) {
  set_activity(doing_exchange(what), -1);
  impl_->send({{"type", "exchange"}, {"what", what}, {"blob", mine}});
  std::unique_lock lock(impl_->mutex);
  const bool done = impl_->changed.wait_for(lock, impl_->deadline + kSlack, [&] {
    return impl_->failure.has_value() || impl_->exchanged.count(what) != 0;
  });
  // What has been exchanged counts, though a rank that found it wrong may have failed by now.
  if (impl_->failure && impl_->exchanged.count(what) == 0) {
    throw_failure(*impl_->failure);
  }
  TRAINRT_REQUIRE(done,
                  kCommunication,
                  "rank ",
                  rank(),
                  ": ",
                  what,
                  ": rank 0 (at ",
                  impl_->where,
                  ") does not answer within ",
                  seconds(impl_->deadline),
                  " s");
  std::vector<std::string> all = std::move(impl_->exchanged.at(what));
  impl_->exchanged.erase(what);
  lock.unlock();
  set_activity(doing_after_exchange(what), -1);
  return all;
}

void Rendezvous::agree(const Facts& facts) {
  const std::vector<std::string> all =
      exchange("comparison of what each rank was started with", message_text(Json(facts)));
  const auto shown = [](const std::string& value) {
    return value.size() <= 80 ? value : value.substr(0, 77) + "...";
  };
  const Facts first = Json::parse(all[0]).get<Facts>();
  std::vector<Facts> others;
  others.reserve(all.size());
  for (const std::string& blob : all) {
    others.push_back(Json::parse(blob).get<Facts>());
  }
  for (size_t i = 0; i < first.size(); ++i) {
    for (size_t r = 1; r < others.size(); ++r) {
      const bool same_kind = i < others[r].size() && others[r][i].first == first[i].first;
      TRAINRT_REQUIRE(same_kind && others[r][i].second == first[i].second,
                      kInvalidArgument,
                      "the ranks were started with different things: ",
                      first[i].first,
                      " is '",
                      shown(first[i].second),
                      "' on rank 0 and '",
                      same_kind ? shown(others[r][i].second) : "unknown",
                      "' on rank ",
                      r,
                      "; start all with the same model, plan, options and version");
    }
  }
}

void Rendezvous::set_activity(const std::string& doing, int waits_for) {
  impl_->begin(doing, waits_for);
}

void Rendezvous::publish(const Failure& failure) noexcept {
  try {
    impl_->send(failure_message(failure));
    impl_->set_failure(failure);
  } catch (...) {  // nothing can be said any more; the others see the connection end
  }
}

std::optional<Failure> Rendezvous::failure() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->failure;
}

std::optional<Failure> Rendezvous::wait_for_failure(milliseconds timeout) const {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait_for(lock, timeout, [&] { return impl_->failure.has_value(); });
  return impl_->failure;
}

Failure Rendezvous::blame(int peer, const std::string& complaint) {
  impl_->send({{"type", "stalled"}, {"peer", peer}, {"complaint", complaint}});
  if (const std::optional<Failure> known = wait_for_failure(kNoticeTimeout)) {
    return *known;
  }
  Failure own = {0,
                 ErrorCode::kCommunication,
                 concat(complaint,
                        ": rank 0 (at ",
                        impl_->where,
                        ") gives no sign of life, it is stopped or hangs")};
  publish(own);
  return own;
}

void Rendezvous::on_failure(std::function<void()> callback) {
  const std::lock_guard lock(impl_->callback_mutex);
  impl_->callback = std::move(callback);
}

void Rendezvous::leave(milliseconds timeout) noexcept {
  try {
    set_activity("leaving", -1);
    {
      const std::lock_guard lock(impl_->mutex);
      impl_->left = true;
    }
    impl_->send({{"type", "bye"}});
    if (impl_->hub) {
      impl_->hub->wait_until_left(timeout);
    }
  } catch (...) {  // leaving anyway
  }
}

}  // namespace trainrt
