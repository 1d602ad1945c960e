// What both ends of the rendezvous agree on.
#pragma once

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "parallel/rendezvous.h"

namespace trainrt {

// How often a rank says what it does: ten times within the deadline, at most twice a second.
inline std::chrono::milliseconds activity_interval(std::chrono::milliseconds deadline) {
  return std::clamp(deadline / 10, std::chrono::milliseconds(50), std::chrono::milliseconds(500));
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
