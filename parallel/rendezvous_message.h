// What both ends of the rendezvous agree on.
#pragma once

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "parallel/rendezvous.h"

namespace trainrt {

// How often a rank says what it does, and rank 0 that it lives: ten times within the deadline, at
// most twice a second.
inline std::chrono::milliseconds activity_interval(std::chrono::milliseconds deadline) {
  return std::clamp(deadline / 10, std::chrono::milliseconds(50), std::chrono::milliseconds(500));
}

// A process that says nothing for so long is stopped, whether somebody waits for it or not. Who
// does wait from its last word on reports at the deadline, and says more.
inline std::chrono::milliseconds longest_silence(std::chrono::milliseconds deadline) {
  return deadline + activity_interval(deadline) * 3 / 2;
}

// Of a rank named before.
inline std::string silence_text(std::chrono::steady_clock::duration length) {
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(length);
  return concat("has given no sign of life for ",
                static_cast<double>(time.count()) / 1000,
                " s, it is stopped or hangs");
}

// What a rank is doing from its part of an exchange on, and from the others' on.
inline std::string doing_exchange(const std::string& what) {
  return "in " + what;
}
inline std::string doing_after_exchange(const std::string& what) {
  return "preparing, after " + what;
}

// Names of files may hold any bytes; a message holds UTF-8.
inline std::string message_text(const nlohmann::json& message) {
  return message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

inline nlohmann::json failure_message(const Failure& failure) {
  return {{"type", "failed"},
          {"rank", failure.rank},
          {"code", static_cast<int>(failure.code)},
          {"message", failure.message}};
}

inline Failure failure_from_message(const nlohmann::json& message) {
  Failure failure;
  failure.rank = message.at("rank");
  failure.code = static_cast<ErrorCode>(message.at("code").get<int>());
  failure.message = message.at("message");
  return failure;
}

}  // namespace trainrt
