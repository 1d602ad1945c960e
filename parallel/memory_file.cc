#include "parallel/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Closes the file when it cannot be mapped.
std::optional<MemoryFile> mapped(int descriptor, int64_t bytes) {
  void* memory = ::mmap(
      nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    ::close(descriptor);
    return std::nullopt;
  }
  return MemoryFile{descriptor, memory};
}

}  // namespace

std::optional<MemoryFile> create_memory_file(int64_t bytes) {
  const int descriptor = ::memfd_create("trainrt", MFD_CLOEXEC);
  if (descriptor < 0) {
    return std::nullopt;
  }
  if (::ftruncate(descriptor, bytes) != 0) {
    ::close(descriptor);
    return std::nullopt;
  }
  return mapped(descriptor, bytes);
}

std::optional<MemoryFile> open_memory_file(int64_t process, int64_t descriptor, int64_t bytes) {
  const std::string path = concat("/proc/", process, "/fd/", descriptor);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  return own < 0 ? std::nullopt : mapped(own, bytes);
}

}  // namespace trainrt
