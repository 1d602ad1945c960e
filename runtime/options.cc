// Sources are applied in order (file, --set, flags), each by the option's own `set`, so a value is
// checked the same way wherever it comes from.
#include "runtime/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "graph/base/error.h"
#include "runtime/config_file.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

struct Given {
  const OptionDef* def = nullptr;
  std::vector<std::string> values;
};

std::vector<std::string> flag_names(unsigned groups) {
  std::vector<std::string> names = {"--help", "--version", "--config", "--set"};
  for (const OptionDef& def : option_table()) {
    if ((def.groups & groups) != 0) {
      names.push_back("--" + def.name);
    }
  }
  return names;
}

void refuse_unknown(const std::string& command,
                    unsigned groups,
                    const std::vector<std::string>& extras) {
  for (const std::string& extra : extras) {
    if (extra.size() < 2 || extra[0] != '-') {
      continue;
    }
    const std::string name = extra.substr(0, extra.find('='));
    const bool known = name == "--config" || name == "--set" ||
                       find_option(name.substr(std::min<size_t>(2, name.size()))) != nullptr;
    TRAINRT_REQUIRE(!known,
                    kInvalidArgument,
                    "'trainrt ",
                    command,
                    "' takes no ",
                    name,
                    "; see 'trainrt ",
                    command,
                    " --help'");
    const std::string near = did_you_mean(name, flag_names(groups));
    TRAINRT_FAIL(kInvalidArgument,
                 "unknown option ",
                 name,
                 near.empty() ? "; see" : near + " See",
                 " 'trainrt ",
                 command,
                 " --help'");
  }
}

// What a shell makes of a variable that is not set. A configuration file may say "" for "none".
void refuse_empty(const std::string& value, const std::string& flag, const std::string& wanted) {
  TRAINRT_REQUIRE(!value.empty(),
                  kInvalidArgument,
                  flag,
                  " is given an empty value; wanted ",
                  wanted,
                  ", or leave it out");
}

// The flags in the order of the table; CLI11 does the splitting and the help.
void add_flags(CLI::App& app, unsigned groups, std::vector<Given>& given) {
  given.reserve(option_table().size());
  for (const OptionDef& def : option_table()) {
    if ((def.groups & groups) == 0) {
      continue;
    }
    const bool seen = std::any_of(
        given.begin(), given.end(), [&](const Given& g) { return g.def->name == def.name; });
    if (seen) {
      continue;
    }
    given.push_back({&def, {}});
    std::vector<std::string>& values = given.back().values;
    const std::string flags = def.name == "output-file" ? "-o,--output-file" : "--" + def.name;
    std::string help = def.help;
    const std::string fallback = def.get(Options{});
    if (!def.value.empty() && !fallback.empty() && fallback != "\"\"" && fallback != "[]") {
      help +=
          " [" + (fallback[0] == '"' ? fallback.substr(1, fallback.size() - 2) : fallback) + "]";
    }
    CLI::Option* option = nullptr;
    if (def.value.empty()) {
      option = app.add_flag_callback(
          flags, [&values] { values.emplace_back("true"); }, help);
    } else {
      option = app.add_option(flags, values, help);
      option->type_name(def.value);
      option->option_text(def.value);  // or the help marks what is kept in a list by " ..."
      option->allow_extra_args(false);
      option->multi_option_policy(def.repeatable ? CLI::MultiOptionPolicy::TakeAll
                                                 : CLI::MultiOptionPolicy::TakeLast);
    }
  }
}

}  // namespace

std::string shown_setting(const std::string& value) {
  const bool quoted = value.size() >= 2 && value.front() == '"' && value.back() == '"';
  const std::string text = quoted ? value.substr(1, value.size() - 2) : value;
  return text.empty() || text == "[]" ? "unset" : text;
}

Options parse_options(const std::string& command,
                      unsigned groups,
                      const std::vector<std::string>& arguments) {
  CLI::App app;
  app.name("trainrt " + command);
  app.allow_extras();
  Options options;
  std::string config;
  std::vector<std::string> set_items;
  // Shown by the command's own first line.
  app.add_option("arguments", options.arguments, "MODEL.onnx, a name, or files")->group("");
  const bool configurable = (groups & (kDataOptions | kPlanOptions)) != 0;
  if (configurable) {
    app.add_option("--config", config, "YAML file of options")
        ->type_name("FILE")
        ->each([](const std::string& value) { refuse_empty(value, "--config", "FILE"); });
    app.add_option("--set", set_items, "one option as in the YAML file (repeatable)")
        ->type_name("KEY=VALUE")
        ->option_text("KEY=VALUE")
        ->allow_extra_args(false);
  }
  std::vector<Given> given;
  add_flags(app, groups, given);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequested{app.help()};
  } catch (const CLI::ParseError& error) {
    TRAINRT_FAIL(kInvalidArgument, error.what(), ". See 'trainrt ", command, " --help'");
  }
  refuse_unknown(command, groups, app.remaining());
  refuse_unknown(command, groups, options.arguments);
  if (!config.empty()) {
    options.config = config;
    options.given.insert("config");
    const std::vector<std::byte> bytes = read_file(config);
    apply_config(
        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), config, options);
  }
  for (const auto& [key, value] : parse_pairs(set_items, "--set")) {
    refuse_empty(value, "--set " + key, key + "=VALUE");
    apply_setting(key, value, "--set " + key, options);
    options.given.insert("set");
  }
  for (const Given& flag : given) {
    if (flag.def->repeatable && !flag.values.empty()) {
      flag.def->clear(options);  // a list from the command line replaces one from a file
    }
    for (const std::string& value : flag.values) {
      refuse_empty(value, "--" + flag.def->name, flag.def->value);
      flag.def->set(options, value, "--" + flag.def->name);
      options.given.insert(flag.def->name);
      options.flags.insert(flag.def->name);
    }
  }
  return options;
}

std::string resolved_config(const Options& options, unsigned groups) {
  std::string text;
  for (const OptionDef& def : option_table()) {
    const std::string value = def.get(options);
    if ((def.groups & groups) != 0 && !value.empty()) {
      text += def.name + ": " + value + "\n";
    }
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> parse_pairs(const std::vector<std::string>& items,
                                                             const std::string& flag) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& item : items) {
    const size_t at = item.find('=');
    TRAINRT_REQUIRE(at != std::string::npos && at > 0,
                    kInvalidArgument,
                    flag,
                    " is '",
                    item,
                    "'; wanted NAME=VALUE");
    const std::string name = item.substr(0, at);
    // Of a key that is set twice the last one counts, as of a flag; two values of a name do not.
    const bool is_new =
        flag == "--set" || std::none_of(pairs.begin(), pairs.end(), [&](const auto& pair) {
          return pair.first == name;
        });
    TRAINRT_REQUIRE(is_new,
                    kInvalidArgument,
                    flag,
                    " gives '",
                    name,
                    "' twice, the second time as '",
                    item,
                    "'");
    pairs.emplace_back(name, item.substr(at + 1));
  }
  return pairs;
}

}  // namespace trainrt
