// Unnamed files in memory, mapped by several processes.
#pragma once

#include <cstdint>
#include <optional>

namespace trainrt {

// The caller unmaps and closes it.
struct MemoryFile {
  int descriptor = -1;
  void* memory = nullptr;
};

// Nothing when the system does not allow it.
std::optional<MemoryFile> create_memory_file(int64_t bytes);
// The one that has this descriptor in another process.
std::optional<MemoryFile> open_memory_file(int64_t process, int64_t descriptor, int64_t bytes);

}  // namespace trainrt
