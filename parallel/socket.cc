// A message is its length in four bytes, least significant first, and its text.
#include "parallel/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr size_t kLargestMessage = size_t{64} << 20;

std::string reason(int error) {
  return std::generic_category().message(error);
}

std::chrono::milliseconds left_until(SteadyClock::time_point end) {
  return std::max(std::chrono::milliseconds(0),
                  std::chrono::ceil<std::chrono::milliseconds>(end - SteadyClock::now()));
}

// Waits for `events` on `fd`; false when none came.
bool wait_for(int fd, short events, SteadyClock::time_point end) {
  for (;;) {
    pollfd wanted{fd, events, 0};
    const int ready = ::poll(&wanted, 1, static_cast<int>(left_until(end).count()));
    if (ready > 0) {
      return true;
    }
    if (ready == 0 || errno != EINTR) {
      return false;
    }
  }
}

void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof(value));
}

void prepare_connection(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

std::string address_text(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
      ::inet_ntop(AF_INET, v6.sin6_addr.s6_addr + 12, text, sizeof(text));
    } else {
      ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    }
  }
  return text;
}

// A listening socket of one address family, or -1 with errno set.
int listen_on(int family, int port) {
  const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    return -1;
  }
  set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  sockaddr_storage address{};
  socklen_t size = sizeof(sockaddr_in);
  if (family == AF_INET6) {
    set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_family = AF_INET6;
    v6.sin6_addr = in6addr_any;
    v6.sin6_port = htons(static_cast<uint16_t>(port));
    size = sizeof(sockaddr_in6);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_ANY);
    v4.sin_port = htons(static_cast<uint16_t>(port));
  }
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
      ::listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

Socket::~Socket() {
  close();
}

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

Socket Socket::listening(int port) {
  int fd = listen_on(AF_INET6, port);
  if (fd < 0 && errno == EAFNOSUPPORT) {
    fd = listen_on(AF_INET, port);
  }
  TRAINRT_REQUIRE(fd >= 0,
                  kCommunication,
                  "rank 0 cannot listen on port ",
                  port,
                  ": ",
                  reason(errno),
                  errno == EADDRINUSE ? "; another program, or an earlier run of this job, has it: "
                                        "end that one or choose another port"
                                      : "");
  return Socket(fd);
}

std::optional<Socket> Socket::connected(const std::string& host,
                                        int port,
                                        std::chrono::milliseconds timeout,
                                        std::string& why) {
  const auto end = SteadyClock::now() + timeout;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    why = concat("the name '", host, "' is not found (", ::gai_strerror(status), ")");
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  const auto note = [&](const addrinfo& at, int error) {
    sockaddr_storage address{};
    std::memcpy(&address, at.ai_addr, std::min<size_t>(at.ai_addrlen, sizeof(address)));
    const std::string text = address_text(address);
    why += concat(why.empty() ? "" : ", ", text == host ? "" : text + ": ", reason(error));
  };
  why.clear();
  int64_t untried = 0;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    ++untried;
  }
  // Each address gets its part of the time: one that swallows packets must not use up another's.
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next, --untried) {
    Socket socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.is_open()) {
      note(*at, errno);
      continue;
    }
    int error = 0;
    if (::connect(socket.fd(), at->ai_addr, at->ai_addrlen) != 0) {
      error = errno;
    }
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      if (wait_for(socket.fd(), POLLOUT, SteadyClock::now() + left_until(end) / untried)) {
        socklen_t size = sizeof(error);
        ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
    if (error == 0) {
      prepare_connection(socket.fd());
      return socket;
    }
    note(*at, error);
  }
  return std::nullopt;
}

std::optional<Socket> Socket::accepted() const {
  const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    return std::nullopt;
  }
  prepare_connection(fd);
  return Socket(fd);
}

int Socket::local_port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(address).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
}

std::string Socket::local_address() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
  return address_text(address);
}

std::string Socket::peer_address() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &size);
  return address_text(address);
}

void Socket::watch_peer_host(std::chrono::milliseconds timeout) const {
  // Probes every second while nothing is under way; unanswered bytes count the same.
  set_option(fd_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd_,
             IPPROTO_TCP,
             TCP_KEEPCNT,
             static_cast<int>(std::max<int64_t>(1, timeout.count() / 1000 - 1)));
  set_option(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout.count()));
}

bool Socket::send_message(const std::string& message, std::chrono::milliseconds timeout) const {
  const auto end = SteadyClock::now() + timeout;
  std::string bytes;
  bytes.reserve(message.size() + 4);
  for (int shift = 0; shift < 32; shift += 8) {
    bytes.push_back(static_cast<char>((message.size() >> shift) & 0xFF));
  }
  bytes += message;
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd_, POLLOUT, end)) {
        return false;
      }
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool is_loopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1";
}

MessageReader::Status MessageReader::read(const Socket& socket, std::string& why) {
  char bytes[16384];
  for (;;) {
    const ssize_t count = ::recv(socket.fd(), bytes, sizeof(bytes), 0);
    if (count > 0) {
      buffer_.append(bytes, static_cast<size_t>(count));
      continue;
    }
    if (count == 0) {
      why = "the connection was closed";
      return Status::kClosed;
    }
    if (errno == EINTR) {
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return Status::kOpen;
    }
    why = reason(errno);
    return Status::kClosed;
  }
}

std::optional<std::string> MessageReader::next() {
  if (buffer_.size() < 4) {
    return std::nullopt;
  }
  size_t size = 0;
  for (size_t i = 0; i < 4; ++i) {
    size |= static_cast<size_t>(static_cast<unsigned char>(buffer_[i])) << (8 * i);
  }
  TRAINRT_REQUIRE(
      size <= kLargestMessage, kCommunication, "what came is no message of this program");
  if (buffer_.size() < 4 + size) {
    return std::nullopt;
  }
  std::string message = buffer_.substr(4, size);
  buffer_.erase(0, 4 + size);
  return message;
}

}  // namespace trainrt
