#include "parallel/gloo_mesh.h"

#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace trainrt {

namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

// Posted sends end when their receiver asks for them or the job ends.
constexpr std::chrono::hours kUnlimited{24 * 365};

constexpr milliseconds kLook{20};  // between two looks at the job's failure
constexpr const char* kConnecting = "connecting to all ranks";

std::vector<int> bytes_of(const std::vector<char>& address) {
  return {address.begin(), address.end()};
}

}  // namespace

GlooMesh::GlooMesh(std::shared_ptr<Rendezvous> rendezvous) : rendezvous_(std::move(rendezvous)) {
  try {
    connect();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // no socket to be had, or no such address
    const Failure own = {rendezvous_->rank(),
                         ErrorCode::kCommunication,
                         concat("rank ",
                                rendezvous_->rank(),
                                " (at ",
                                rendezvous_->address(),
                                ") cannot be connected to: ",
                                error.what())};
    rendezvous_->publish(own);
    throw_failure(kConnecting, own);
  }
  rendezvous_->on_failure([this] { interrupt(); });
  releaser_ = std::thread([this] { release_posted(); });
}

GlooMesh::~GlooMesh() {
  rendezvous_->on_failure(nullptr);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  interrupt();
  releaser_.join();
}

void GlooMesh::connect() {
  const int rank = rendezvous_->rank(), size = rendezvous_->world_size();
  device_ = gloo::transport::tcp::CreateDevice(
      gloo::transport::tcp::attr(rendezvous_->address().c_str()));
  context_ = device_->createContext(rank, size);
  context_->setTimeout(rendezvous_->deadline());
  Json own = Json::array();
  for (int peer = 0; peer < size; ++peer) {
    own.push_back(peer == rank ? std::vector<int>()
                               : bytes_of(context_->createPair(peer)->address().bytes()));
  }
  const std::vector<std::string> all = rendezvous_->exchange("exchange of addresses", own.dump());
  const auto end = SteadyClock::now() + rendezvous_->deadline();
  // Gloo waits for a connection for five times its timeout and looks at nothing else; closing the
  // pair ends the wait. Again and again, since a pair that is closed before its turn begins anew.
  const std::jthread guard([&](const std::stop_token& connected) {
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    while (!connected.stop_requested()) {
      if (rendezvous_->failure() || SteadyClock::now() >= end) {
        close_pairs();
      }
      wake.wait_for(lock, connected, kLook, [] { return false; });
    }
  });
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) {
      continue;
    }
    const std::vector<int> address =
        Json::parse(all[static_cast<size_t>(peer)]).at(static_cast<size_t>(rank));
    rendezvous_->set_activity(kConnecting, peer);
    std::string broken;
    try {
      context_->getPair(peer)->connect(std::vector<char>(address.begin(), address.end()));
    } catch (const std::exception& error) {
      broken = error.what();
    }
    if (!broken.empty() || rendezvous_->failure() || SteadyClock::now() >= end) {
      throw_ended(kConnecting, peer, end, broken);
    }
  }
}

void GlooMesh::close_pairs() {
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer != context_->rank) {
      context_->getPair(peer)->close();
    }
  }
}

GlooMesh::Transfer GlooMesh::send(const void* data, int64_t bytes, int peer, uint64_t slot) {
  // Gloo has one kind of buffer for both directions, and does not write to one that is sent.
  Transfer transfer{
      context_->createUnboundBuffer(const_cast<void*>(data), static_cast<size_t>(bytes)),
      peer,
      false};
  try {
    transfer.buffer->send(peer, slot);
  } catch (const std::exception&) {  // broken or closed, as wait() will find
  }
  return transfer;
}

GlooMesh::Transfer GlooMesh::receive(void* data, int64_t bytes, int peer, uint64_t slot) {
  Transfer transfer{context_->createUnboundBuffer(data, static_cast<size_t>(bytes)), peer, true};
  try {
    transfer.buffer->recv(peer, slot);
  } catch (const std::exception&) {  // as above
  }
  return transfer;
}

void GlooMesh::post(std::vector<std::byte> data, int peer, uint64_t slot) {
  Posted posted{std::move(data), {}};
  posted.transfer = send(posted.data.data(), static_cast<int64_t>(posted.data.size()), peer, slot);
  const std::lock_guard lock(mutex_);
  posted_.push_back(std::move(posted));
  changed_.notify_all();
}

void GlooMesh::release_posted() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !posted_.empty(); });
    if (stopping_) {
      return;
    }
    const Posted posted = std::move(posted_.front());
    posted_.pop_front();
    lock.unlock();
    try {
      if (!wait_in_gloo(posted.transfer, kUnlimited)) {
        return;
      }
    } catch (const std::exception&) {  // whoever waits for something will say so
    }
  }
}

// Gloo's own wait, which interrupt() ends; false when it did.
bool GlooMesh::wait_in_gloo(const Transfer& transfer, milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || rendezvous_->failure()) {
      return false;
    }
    waiting_.push_back(&transfer);
  }
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &transfer));
  };
  try {
    const bool done = transfer.receives ? transfer.buffer->waitRecv(nullptr, timeout)
                                        : transfer.buffer->waitSend(nullptr, timeout);
    forget();
    return done;
  } catch (...) {
    forget();
    throw;
  }
}

void GlooMesh::interrupt() {
  const std::lock_guard lock(mutex_);
  for (const Transfer* transfer : waiting_) {
    transfer->receives ? transfer->buffer->abortWaitRecv() : transfer->buffer->abortWaitSend();
  }
}

void GlooMesh::wait(const Transfer& transfer,
                    const std::string& doing,
                    SteadyClock::time_point end) {
  rendezvous_->set_activity("in " + doing, transfer.peer);
  std::string broken;
  try {
    const auto left = std::chrono::ceil<milliseconds>(end - SteadyClock::now());
    if (wait_in_gloo(transfer, std::max(left, milliseconds(1)))) {
      return;
    }
  } catch (const std::exception& error) {
    broken = error.what();
  }
  throw_ended(doing, transfer.peer, end, broken);
}

void GlooMesh::throw_ended(const std::string& doing,
                           int peer,
                           SteadyClock::time_point end,
                           const std::string& broken) {
  if (const std::optional<Failure> known = rendezvous_->failure()) {
    throw_failure(doing, *known);
  }
  if (SteadyClock::now() >= end) {
    throw_stalled(doing, peer);
  }
  if (const std::optional<Failure> known = rendezvous_->wait_for_failure(kNoticeTimeout)) {
    throw_failure(doing, *known);
  }
  const Failure own = {peer,
                       ErrorCode::kCommunication,
                       concat("the connection between ranks ",
                              rendezvous_->rank(),
                              " and ",
                              peer,
                              " broke in ",
                              doing,
                              ": ",
                              broken)};
  rendezvous_->publish(own);
  throw_failure(doing, own);
}

void GlooMesh::throw_stalled(const std::string& doing, int peer) {
  const double seconds = static_cast<double>(rendezvous_->deadline().count()) / 1000;
  throw_failure(doing,
                rendezvous_->blame(peer,
                                   concat("rank ",
                                          rendezvous_->rank(),
                                          " waited ",
                                          seconds,
                                          " s in ",
                                          doing,
                                          " for rank ",
                                          peer)));
}

void GlooMesh::throw_failure(const std::string& doing, const Failure& failure) const {
  throw Error(failure.code,
              concat("rank ", rendezvous_->rank(), ": ", doing, ": ", failure.message));
}

}  // namespace trainrt
