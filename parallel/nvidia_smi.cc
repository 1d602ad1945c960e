// Both listings become one table of (section.key -> value) per GPU, from which the few figures that
// planning needs are taken.
//
// Speed: a card slowed down by heat or power runs at its present clock, so its speed is that clock
// over the highest; otherwise at its applications clock, where one below the highest is set. An
// idle card's low clock says nothing and is not used.
#include "parallel/nvidia_smi.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <optional>
#include <sstream>

#include "graph/base/error.h"
#include "parallel/csv.h"
#include "parallel/device_catalogue.h"

namespace trainrt {

namespace {

using Properties = std::map<std::string, std::string>;

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string::npos
             ? ""
             : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

// ---- nvidia-smi -q: "GPU 00000000:07:00.0", then indented "Key : Value" lines under headings.

std::vector<Properties> parse_log(const std::string& text) {
  std::vector<Properties> gpus;
  std::vector<std::pair<size_t, std::string>> headings;  // (indentation, name), outermost first
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string content = trimmed(line);
    const size_t indentation = line.find_first_not_of(' ');
    if (content.empty()) {
      continue;
    }
    if (indentation == 0 && content.rfind("GPU ", 0) == 0) {
      gpus.emplace_back();
      headings.clear();
      continue;
    }
    if (gpus.empty()) {
      continue;
    }
    while (!headings.empty() && headings.back().first >= indentation) {
      headings.pop_back();
    }
    const size_t colon = content.find(" : ");
    if (colon == std::string::npos) {
      headings.emplace_back(indentation, content);
      continue;
    }
    std::string path;
    for (const auto& heading : headings) {
      path += heading.second + ".";
    }
    gpus.back()[lower(path + trimmed(content.substr(0, colon)))] =
        trimmed(content.substr(colon + 3));
  }
  return gpus;
}

// ---- --query-gpu: a header "name, memory.total [MiB], ...", then a line for each GPU.

std::vector<Properties> parse_query(const std::string& text, const std::string& where) {
  std::vector<Properties> gpus;
  for (const CsvRow& row : parse_csv(text, where)) {
    Properties& gpu = gpus.emplace_back();
    for (const auto& [column, value] : row) {
      gpu[lower(trimmed(column.substr(0, column.find('['))))] = trimmed(value);
    }
  }
  return gpus;
}

// The first of the names that the GPU has a value for.
std::optional<std::string> find(const Properties& gpu, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto found = gpu.find(name);
    if (found != gpu.end() && !found->second.empty() && found->second[0] != '[' &&
        found->second != "N/A") {
      return found->second;
    }
  }
  return std::nullopt;
}

// "81920 MiB", "1410 MHz": the number in front.
std::optional<double> number(const Properties& gpu, const std::vector<std::string>& names) {
  const std::optional<std::string> text = find(gpu, names);
  double value = 0;
  if (!text ||
      std::from_chars(text->data(), text->data() + text->size(), value).ec != std::errc()) {
    return std::nullopt;
  }
  return value;
}

bool is_held_down(const Properties& gpu) {
  return std::any_of(gpu.begin(), gpu.end(), [](const auto& entry) {
    const bool reason = entry.first.find("slowdown") != std::string::npos ||
                        entry.first.find("power_cap") != std::string::npos ||
                        entry.first.find("power cap") != std::string::npos;
    return reason && entry.second == "Active";
  });
}

double speed_of(const Properties& gpu) {
  const std::optional<double> highest = number(gpu, {"clocks.max.sm", "max clocks.sm"});
  const std::optional<double> clock =
      is_held_down(gpu)
          ? number(gpu, {"clocks.sm", "clocks.current.sm"})
          : number(gpu, {"clocks.applications.graphics", "applications clocks.graphics"});
  if (!highest || !clock || *highest <= 0 || *clock <= 0) {
    return 1;
  }
  return std::min(1.0, *clock / *highest);
}

SmiDevice device_of(const Properties& gpu, const std::string& where, LinkType* intra) {
  const std::optional<std::string> name = find(gpu, {"name", "gpu_name", "product name"});
  TRAINRT_REQUIRE(name.has_value(),
                  kInvalidArgument,
                  where,
                  ": a GPU has no name; wanted the output of `nvidia-smi -q`, or of "
                  "`nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv` with its "
                  "header");
  const CatalogueEntry known = find_device(*name);
  SmiDevice device;
  device.type = known.device;
  if (const auto total = number(gpu, {"memory.total", "fb memory usage.total"})) {
    device.type.memory_bytes = static_cast<int64_t>(*total) << 20;
  }
  const double used = number(gpu, {"memory.used", "fb memory usage.used"}).value_or(0) +
                      number(gpu, {"memory.reserved", "fb memory usage.reserved"}).value_or(0);
  device.used_bytes = static_cast<int64_t>(used) << 20;
  device.type.speed = speed_of(gpu);
  *intra = known.intra;
  return device;
}

// ---- nvidia-smi topo -m: a matrix of NV#, PIX, PXB, PHB, NODE, SYS over GPUs and network cards.

struct Matrix {
  std::vector<std::vector<std::string>> gpu_links;  // [GPU][GPU]
  int num_nics = 0;
};

bool is_gpu(const std::string& word) {
  return word.rfind("GPU", 0) == 0 && word.size() > 3 &&
         std::isdigit(static_cast<unsigned char>(word[3])) != 0;
}

Matrix parse_matrix(const std::string& text, const std::string& where) {
  Matrix matrix;
  size_t columns = 0;  // GPUs of the header
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line) && trimmed(line).rfind("Legend", 0) != 0) {
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) {
      words.push_back(word);
    }
    if (words.empty()) {
      continue;
    }
    if (columns == 0) {
      columns = static_cast<size_t>(std::count_if(words.begin(), words.end(), is_gpu));
    } else if (is_gpu(words[0])) {
      TRAINRT_REQUIRE(words.size() > columns,
                      kInvalidArgument,
                      where,
                      ": row ",
                      words[0],
                      " has ",
                      words.size() - 1,
                      " entries for ",
                      columns,
                      " GPUs");
      matrix.gpu_links.emplace_back(words.begin() + 1,
                                    words.begin() + 1 + static_cast<std::ptrdiff_t>(columns));
    } else if (words[0].rfind("NIC", 0) == 0 || words[0].rfind("mlx", 0) == 0) {
      matrix.num_nics += words.size() > columns ? 1 : 0;  // not the legend's "NIC0: mlx5_0"
    }
  }
  TRAINRT_REQUIRE(columns > 0 && matrix.gpu_links.size() == columns,
                  kInvalidArgument,
                  where,
                  ": the matrix of `nvidia-smi topo -m` has ",
                  columns,
                  " GPU columns and ",
                  matrix.gpu_links.size(),
                  " GPU rows");
  return matrix;
}

// One NVLink's rate in one direction: 20 GB/s of the first generation, 50 of the fifth, 25 between
// [NVIDIA data sheets].
double nvlink_bandwidth(const std::string& architecture) {
  return architecture == "pascal" ? 20e9 : architecture == "blackwell" ? 50e9 : 25e9;
}

LinkType pair_link(const std::string& word, const LinkType& pcie, const DeviceType& type) {
  int count = 0;
  if (word.rfind("NV", 0) == 0 &&
      std::from_chars(word.data() + 2, word.data() + word.size(), count).ec == std::errc()) {
    return {
        concat("nvlink x ", count), LinkKind::kNvLink, count * nvlink_bandwidth(type.architecture)};
  }
  return pcie;
}

LinkType pcie_of(const Properties& gpu) {
  const double generation = number(gpu,
                                   {"pcie.link.gen.max",
                                    "pcie.link.gen.gpumax",
                                    "pci.gpu link info.pcie generation.max",
                                    "pci.gpu link info.pcie generation.device max"})
                                .value_or(4);
  return find_link(generation >= 5 ? "pcie5" : generation >= 4 ? "pcie4" : "pcie3");
}

}  // namespace

bool is_smi_topology(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line) && trimmed(line).empty()) {
  }
  std::istringstream words(line);
  std::string first;
  words >> first;
  return is_gpu(first);
}

bool is_smi_query(const std::string& text) {
  const std::string header = text.substr(0, text.find('\n'));
  const bool csv =
      header.find(',') != std::string::npos &&
      (header.find("memory.") != std::string::npos || header.find("name,") != std::string::npos) &&
      header.find('{') == std::string::npos;
  return csv || text.find("NVSMI LOG") != std::string::npos;
}

SmiHost read_smi_host(const SmiFile& query, const SmiFile& topology) {
  const std::vector<Properties> gpus = query.text.find("NVSMI LOG") != std::string::npos
                                           ? parse_log(query.text)
                                           : parse_query(query.text, query.name);
  TRAINRT_REQUIRE(!gpus.empty(), kInvalidArgument, query.name, ": it lists no GPU");
  SmiHost host;
  LinkType usual;
  for (const Properties& gpu : gpus) {
    host.devices.push_back(device_of(gpu, query.name, host.devices.empty() ? &host.intra : &usual));
  }
  const CatalogueEntry known = find_device(host.devices[0].type.name);
  host.inter = known.inter;
  host.num_nics = known.num_nics;
  if (topology.name.empty()) {
    return host;
  }
  const Matrix matrix = parse_matrix(topology.text, topology.name);
  TRAINRT_REQUIRE(matrix.gpu_links.size() == host.devices.size(),
                  kInvalidArgument,
                  topology.name,
                  ": the matrix has ",
                  matrix.gpu_links.size(),
                  " GPUs, but the listing ",
                  query.name,
                  " has ",
                  host.devices.size());
  const LinkType pcie = pcie_of(gpus[0]);
  bool first = true;
  for (size_t i = 0; i < matrix.gpu_links.size(); ++i) {
    for (size_t j = 0; j < matrix.gpu_links.size(); ++j) {
      if (i == j) {
        continue;
      }
      const LinkType link = pair_link(matrix.gpu_links[i][j], pcie, host.devices[i].type);
      if (first || link.bandwidth < host.intra.bandwidth) {
        host.intra = link;
      }
      first = false;
    }
  }
  host.num_nics = std::max(1, matrix.num_nics);
  return host;
}

}  // namespace trainrt
