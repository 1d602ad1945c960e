// Options from YAML: every flag by its name, and groups of flags under friendlier names.
#pragma once

#include <string>

#include "runtime/options.h"

namespace trainrt {

// Sets what `text` (YAML) holds; `where` names the file. Throws kInvalidArgument naming file, line
// and key, with near names for unknown keys.
void apply_config(const std::string& text, const std::string& where, Options& options);

// One --set KEY=VALUE: "lr", "optim.lr", ...; VALUE is YAML.
void apply_setting(const std::string& key,
                   const std::string& value,
                   const std::string& where,
                   Options& options);

}  // namespace trainrt
