// TCP connections that carry whole messages, each with a deadline: what the ranks of a job say to
// each other beside their tensors.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace trainrt {

using SteadyClock = std::chrono::steady_clock;

// Owns a file descriptor of a TCP socket.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // On all interfaces, IPv6 and IPv4; port 0 lets the system choose. Throws kCommunication when the
  // port is taken or may not be used.
  static Socket listening(int port);
  // Nothing, and why, when there is no connection within `timeout`.
  static std::optional<Socket> connected(const std::string& host,
                                         int port,
                                         std::chrono::milliseconds timeout,
                                         std::string& why);
  std::optional<Socket> accepted() const;

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int local_port() const;
  // As numbers ("10.0.0.7"), of this end and of the other.
  std::string local_address() const;
  std::string peer_address() const;
  // The connection breaks when the other host answers nothing for `timeout`, though its process may
  // be stopped: what is watched is the host and the way to it.
  void watch_peer_host(std::chrono::milliseconds timeout) const;
  void close();

  // Sends one message; false when the connection is broken or the other end takes nothing for
  // `timeout`. One thread at a time.
  bool send_message(const std::string& message, std::chrono::milliseconds timeout) const;

 private:
  int fd_ = -1;
};

bool is_loopback(const std::string& address);

// The messages that come in on a socket.
class MessageReader {
 public:
  enum class Status { kOpen, kClosed };

  // Takes in what has arrived, without waiting. `why` says how the connection ended.
  Status read(const Socket& socket, std::string& why);
  // The next whole message, if there is one. Throws kCommunication for what is none.
  std::optional<std::string> next();

 private:
  std::string buffer_;
};

}  // namespace trainrt
