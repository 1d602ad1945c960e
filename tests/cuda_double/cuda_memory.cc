#include "tests/cuda_double/cuda_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace cuda_double {

namespace {

struct Allocation {
  int device = 0;
  size_t bytes = 0;
  std::byte* base = nullptr;  // of the mapping, guard pages included
  size_t mapped = 0;
  bool host = false;
};

constexpr unsigned char kCanary = 0xa5;

std::map<const std::byte*, Allocation> allocations;  // by first byte
std::vector<size_t> used, most_used;                 // by device
int accesses = 0;                                    // alive

size_t page() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void protect_all(int protection) {
  for (const auto& [data, allocation] : allocations) {
    if (!allocation.host) {
      mprotect(allocation.base + page(), allocation.mapped - 2 * page(), protection);
    }
  }
}

}  // namespace

MemoryAccess::MemoryAccess() {
  if (accesses++ == 0) {
    protect_all(PROT_READ | PROT_WRITE);
  }
}

MemoryAccess::~MemoryAccess() {
  if (--accesses == 0) {
    protect_all(PROT_NONE);
  }
}

void reset_memory(int num_devices) {
  used.assign(static_cast<size_t>(num_devices), 0);
  most_used = used;
}

size_t used_bytes(int device) {
  return used[static_cast<size_t>(device)];
}

size_t most_used_bytes(int device) {
  return most_used[static_cast<size_t>(device)];
}

bool take_bytes(int device, std::ptrdiff_t bytes, size_t memory_bytes) {
  const size_t then = used[static_cast<size_t>(device)] + static_cast<size_t>(bytes);
  if (bytes > 0 && then > memory_bytes) {
    return false;
  }
  used[static_cast<size_t>(device)] = then;
  return true;
}

size_t num_allocations() {
  return allocations.size();
}

int owner_of(const void* data, size_t bytes) {
  const std::byte* at = static_cast<const std::byte*>(data);
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) {
    return kUnknown;
  }
  --next;
  if (at + bytes > next->first + next->second.bytes) {
    return kUnknown;
  }
  return next->second.host ? kPinned : next->second.device;
}

cudaError_t allocate(void** to, size_t bytes, int device, bool host) {
  const size_t slack_free = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  const size_t body = (slack_free + page() - 1) / page() * page();
  void* base = mmap(nullptr, body + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return cudaErrorMemoryAllocation;
  }
  std::byte* first = static_cast<std::byte*>(base) + page();
  mprotect(first, body, PROT_READ | PROT_WRITE);
  std::byte* data = first + body - slack_free;  // ends at the guard page
  std::memset(data, host ? 0 : 0xff, bytes);
  std::memset(data + bytes, kCanary, slack_free - bytes);
  allocations[data] = {device, bytes, static_cast<std::byte*>(base), body + 2 * page(), host};
  if (!host) {
    size_t& now = used[static_cast<size_t>(device)];
    size_t& most = most_used[static_cast<size_t>(device)];
    now += bytes;
    most = std::max(most, now);
    if (accesses == 0) {
      mprotect(first, body, PROT_NONE);
    }
  }
  *to = data;
  return cudaSuccess;
}

cudaError_t release(void* data, bool host) {
  const auto at = allocations.find(static_cast<std::byte*>(data));
  if (at == allocations.end() || at->second.host != host) {
    return cudaErrorInvalidValue;
  }
  const Allocation allocation = at->second;
  if (!host) {
    const MemoryAccess access;
    const std::byte* end = allocation.base + allocation.mapped - page();
    for (const std::byte* byte = at->first + allocation.bytes; byte < end; ++byte) {
      if (*byte != std::byte{kCanary}) {
        std::fprintf(stderr, "device memory was written past its end\n");
        std::abort();
      }
    }
    used[static_cast<size_t>(allocation.device)] -= allocation.bytes;
  }
  allocations.erase(at);
  munmap(allocation.base, allocation.mapped);
  return cudaSuccess;
}

}  // namespace cuda_double
