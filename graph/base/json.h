// JSON from outside: plans, reports, checkpoints, metadata of models.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "graph/base/error.h"

namespace trainrt {

// Values are copied and printed recursively; what is read is nested less deep.
inline constexpr int kMostJsonDepth = 200;

// Throws `code`, in words that begin with `what`, for a text that is no JSON or is nested deeper.
nlohmann::ordered_json parse_json(std::string_view text,
                                  const std::string& what,
                                  ErrorCode code = ErrorCode::kInvalidArgument);

// A value as an error message shows it: on one line, cut where it is long.
std::string json_excerpt(const nlohmann::ordered_json& value);

}  // namespace trainrt
