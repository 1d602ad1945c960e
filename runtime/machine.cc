#include "runtime/machine.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

#include "runtime/device.h"

namespace trainrt {

namespace {

// A "key: value kB" line of /proc/meminfo in bytes, 0 when missing.
int64_t meminfo(const std::string& key) {
  std::ifstream stream("/proc/meminfo");
  std::string line;
  while (std::getline(stream, line)) {
    if (line.rfind(key + ":", 0) == 0) {
      return std::stoll(line.substr(key.size() + 1)) * 1024;
    }
  }
  return 0;
}

// The memory limit of this process's control group, or 0.
int64_t group_limit() {
  std::ifstream stream("/sys/fs/cgroup/memory.max");
  int64_t limit = 0;
  return stream >> limit ? limit : 0;
}

std::string cpu_model() {
  std::ifstream stream("/proc/cpuinfo");
  std::string line;
  while (std::getline(stream, line)) {
    if (line.rfind("model name", 0) == 0) {
      return line.substr(line.find(':') + 2);
    }
  }
  return "unknown";
}

}  // namespace

int num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

int64_t available_memory_bytes() {
  const int64_t available = meminfo("MemAvailable");
  const int64_t limit = group_limit();
  return limit > 0 && limit < available ? limit : available;
}

Machine describe_machine() {
  Machine machine;
  machine.cpu = cpu_model();
  machine.isa = cpu_device_spec({}).isa;
  machine.cores = num_usable_cores();
  machine.memory_bytes = meminfo("MemTotal");
  machine.available_bytes = available_memory_bytes();
  if (const int64_t limit = group_limit(); limit > 0 && limit < machine.memory_bytes) {
    machine.memory_bytes = limit;
  }
  try {
    machine.gpus = cuda_module().devices();
    machine.cuda_versions = cuda_module().versions();
  } catch (const Error& error) {
    machine.no_gpu_reason = error.message();
  }
  return machine;
}

}  // namespace trainrt
