// A name is cut into lower-case words. Two names match when one's words include the other's: the
// query may leave words out ("A100") or add some ("H100-96GB HBM2e 500W"). Among several matches
// the one with the most shared words wins, then the largest memory, then the first in the table.
#include "parallel/device_catalogue.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>

#include "graph/base/error.h"
#include "parallel/csv.h"
#include "parallel/embedded_data.h"

namespace trainrt {

namespace {

// NVIDIA drivers keep about this much for context and kernels; BigScience logged 1271 MiB on A100.
constexpr int64_t kCudaReservedBytes = int64_t{1271} << 20;

std::string without_parenthesis(const std::string& name) {
  std::string text = name.substr(0, name.find('('));
  while (!text.empty() && text.back() == ' ') {
    text.pop_back();
  }
  return text;
}

// "sxm4" and "sxm" are one word, as are "16gb" and "16gib"; vendor words say nothing.
std::string normal_word(std::string word) {
  if (word.starts_with("sxm")) {
    return "sxm";
  }
  if (word.size() > 3 && word.ends_with("gib")) {
    word.replace(word.size() - 3, 3, "gb");
  }
  static const std::set<std::string> kVendor = {
      "nvidia", "tesla", "geforce", "gpu", "hbm2", "hbm2e", "hbm3", "hbm3e"};
  return kVendor.count(word) != 0 ? "" : word;
}

std::set<std::string> words_of(const std::string& name) {
  std::set<std::string> words;
  std::string word;
  const auto flush = [&] {
    word = normal_word(word);
    if (!word.empty()) {
      words.insert(word);
    }
    word.clear();
  };
  for (const char c : without_parenthesis(name)) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else {
      flush();
    }
  }
  flush();
  return words;
}

CatalogueEntry make_entry(CsvRow& row, const std::string& name, const std::string& memory_gib) {
  CatalogueEntry entry;
  entry.device.name = name;
  entry.device.memory_bytes = std::stoll(memory_gib) << 30;
  entry.device.reserved_bytes = kCudaReservedBytes;
  entry.device.memory_bandwidth = std::stod(row["memory_gbs"]) * 1e9;
  for (const char* precision : {"fp64", "fp32", "tf32", "fp16", "bf16", "fp8"}) {
    const std::string& rate = row[std::string(precision) + "_tflops"];
    if (!rate.empty()) {
      entry.device.flops[precision] = std::stod(rate) * 1e12;
    }
  }
  entry.device.sustained = std::stod(row["sustained"]);
  entry.device.architecture = row["architecture"];
  entry.device.num_sms = std::stoi(row["num_sms"]);
  entry.intra = find_link(row["intra"]);
  entry.devices_per_host = std::stoi(row["devices_per_host"]);
  entry.inter = find_link(row["inter"]);
  entry.num_nics = std::stoi(row["nics"]);
  entry.source = row["source"];
  return entry;
}

std::vector<CatalogueEntry> parse_catalogue() {
  std::vector<CatalogueEntry> entries;
  for (CsvRow& row : parse_csv(embedded_devices_csv(), "devices.csv")) {
    const std::string memory = row["memory_gib"];
    std::istringstream sizes(memory);  // "16/32": one entry each
    std::string size;
    while (std::getline(sizes, size, '/')) {
      std::string name = row["name"];
      if (memory.find('/') != std::string::npos) {
        name = name.substr(0, name.find(memory)) + size + "GB";
      }
      entries.push_back(make_entry(row, name, size));
    }
  }
  return entries;
}

bool includes(const std::set<std::string>& a, const std::set<std::string>& b) {
  return std::includes(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

const std::vector<CatalogueEntry>& device_catalogue() {
  static const std::vector<CatalogueEntry> kEntries = parse_catalogue();
  return kEntries;
}

const std::vector<std::pair<std::string, std::string>>& device_aliases() {
  static const std::vector<std::pair<std::string, std::string>> kAliases = {
      {"h100", "H100-SXM5-80GB"},  // the 96 GB part is a rarity of one operator
      {"h100-sxm", "H100-SXM5-80GB"},
      {"gh-96", "GH200-96GB"},
      {"gh200", "GH200-96GB"},
      {"2080ti", "RTX 2080 Ti"},
      {"rtx-2080ti", "RTX 2080 Ti"},
      {"rtx-titan", "Titan RTX"},
      {"gb200", "GB200 (per GPU)"},
  };
  return kAliases;
}

std::optional<CatalogueEntry> match_device(const std::string& name) {
  std::set<std::string> wanted = words_of(name);
  for (const auto& [alias, target] : device_aliases()) {
    if (words_of(alias) == wanted) {
      wanted = words_of(target);
      break;
    }
  }
  const CatalogueEntry* best = nullptr;
  size_t best_shared = 0;
  for (const CatalogueEntry& entry : device_catalogue()) {
    const std::set<std::string> words = words_of(entry.device.name);
    if (wanted.empty() || (!includes(words, wanted) && !includes(wanted, words))) {
      continue;
    }
    const size_t shared = std::min(words.size(), wanted.size());
    if (best == nullptr || shared > best_shared ||
        (shared == best_shared && entry.device.memory_bytes > best->device.memory_bytes)) {
      best = &entry;
      best_shared = shared;
    }
  }
  return best == nullptr ? std::nullopt : std::optional<CatalogueEntry>(*best);
}

CatalogueEntry find_device(const std::string& name) {
  std::optional<CatalogueEntry> found = match_device(name);
  if (found.has_value()) {
    return *found;
  }
  std::vector<std::string> names;
  for (const CatalogueEntry& entry : device_catalogue()) {
    names.push_back(entry.device.name);
    std::string lower;
    for (const char c : without_parenthesis(entry.device.name)) {
      lower += c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    names.push_back(lower);
    const size_t form = lower.find("-sxm");  // users write a100-80gb-sxm for A100-SXM4-80GB
    if (form != std::string::npos && form + 5 < lower.size()) {
      names.push_back(lower.substr(0, form) + lower.substr(form + 5) + "-sxm");
    }
  }
  for (const auto& [alias, target] : device_aliases()) {
    names.push_back(alias);
  }
  TRAINRT_FAIL(kInvalidArgument,
               "unknown device type '",
               name,
               "'",
               did_you_mean(name, names),
               "; describe it under `devices:` of the cluster file");
}

}  // namespace trainrt
