#include "runtime/file_bytes.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "graph/base/error.h"
#include "graph/output_path.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

std::string system_reason() {
  return errno != 0 ? std::strerror(errno) : "unknown reason";
}

}  // namespace

std::vector<std::byte> read_file(const std::string& path) {
  std::error_code error;
  TRAINRT_REQUIRE(!fs::is_directory(path, error), kIo, "'", path, "' is a folder, wanted a file");
  errno = 0;
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  TRAINRT_REQUIRE(stream.good(), kIo, "cannot open '", path, "': ", system_reason());
  const std::streamoff size = stream.tellg();
  stream.seekg(0);
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  stream.read(reinterpret_cast<char*>(bytes.data()), size);
  TRAINRT_REQUIRE(stream.gcount() == size, kIo, "cannot read '", path, "': ", system_reason());
  return bytes;
}

std::vector<std::byte> read_maybe_gzip(const std::string& path) {
  std::vector<std::byte> packed = read_file(path);
  if (packed.size() < 2 || packed[0] != std::byte{0x1f} || packed[1] != std::byte{0x8b}) {
    return packed;
  }
  z_stream stream = {};
  // 16 + 15: a gzip header, the largest window.
  TRAINRT_CHECK(inflateInit2(&stream, 16 + 15) == Z_OK, "zlib does not start");
  stream.next_in = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_in = static_cast<uInt>(packed.size());
  std::vector<std::byte> bytes(packed.size() * 4 + 1024);
  int status = Z_OK;
  while (status == Z_OK) {
    if (stream.total_out == bytes.size()) {
      bytes.resize(bytes.size() * 2);
    }
    stream.next_out = reinterpret_cast<Bytef*>(bytes.data()) + stream.total_out;
    stream.avail_out = static_cast<uInt>(bytes.size() - stream.total_out);
    status = inflate(&stream, Z_NO_FLUSH);
  }
  const size_t total = stream.total_out;
  inflateEnd(&stream);
  TRAINRT_REQUIRE(status == Z_STREAM_END,
                  kInvalidArgument,
                  "'",
                  path,
                  "' is a damaged or cut gzip file (zlib code ",
                  status,
                  ")");
  bytes.resize(total);
  return bytes;
}

std::vector<std::byte> inflate_raw(const std::byte* data,
                                   size_t bytes,
                                   size_t inflated_bytes,
                                   const std::string& what) {
  z_stream stream = {};
  TRAINRT_CHECK(inflateInit2(&stream, -15) == Z_OK, "zlib does not start");  // -15: raw deflate
  std::vector<std::byte> result(inflated_bytes);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(data));
  stream.avail_in = static_cast<uInt>(bytes);
  stream.next_out = reinterpret_cast<Bytef*>(result.data());
  stream.avail_out = static_cast<uInt>(inflated_bytes);
  const int status = inflate(&stream, Z_FINISH);
  const bool complete = status == Z_STREAM_END && stream.total_out == inflated_bytes;
  inflateEnd(&stream);
  TRAINRT_REQUIRE(complete, kInvalidArgument, what, " is damaged (zlib code ", status, ")");
  return result;
}

std::ostream* standard_stream(const std::string& path) {
  struct stat wanted = {};
  if (::stat(path.c_str(), &wanted) != 0) {
    return nullptr;
  }
  for (const auto& [descriptor, stream] :
       {std::pair<int, std::ostream*>{STDOUT_FILENO, &std::cout}, {STDERR_FILENO, &std::cerr}}) {
    struct stat own = {};
    if (::fstat(descriptor, &own) == 0 && own.st_dev == wanted.st_dev &&
        own.st_ino == wanted.st_ino) {
      return stream;
    }
  }
  return nullptr;
}

FolderLock::FolderLock(const std::string& path, const std::string& what)
    : descriptor_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  // Ranks of a run that was killed just now may take a moment to end.
  constexpr int kMostTries = 50;
  constexpr std::chrono::milliseconds kPause{100};
  for (int tries = 1; descriptor_ >= 0; ++tries) {
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) {
      return;
    }
    if (tries == kMostTries) {
      ::close(descriptor_);
      TRAINRT_FAIL(kIo,
                   what,
                   " '",
                   path,
                   "': another run is writing there; wait until it has ended, or choose another "
                   "folder");
    }
    std::this_thread::sleep_for(kPause);
  }
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd >= 0) {
    ::fsync(fd);  // a file system without this promise is no reason to fail
    ::close(fd);
  }
}

void require_writable(const std::string& path, const std::string& flag) {
  const OutputPath place = resolve_output(path, concat(flag, " '", path, "'"));
  if (place.is_stream) {
    return;  // writing will tell
  }
  std::error_code error;
  const fs::path folder = fs::path(place.path).parent_path();
  TRAINRT_REQUIRE(folder.empty() || fs::is_directory(folder, error),
                  kIo,
                  flag,
                  " '",
                  path,
                  "': folder '",
                  folder.string(),
                  "' does not exist");
  const std::string probe = concat(place.path, ".probe.", ::getpid());
  errno = 0;
  const int fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0644);
  TRAINRT_REQUIRE(fd >= 0, kIo, flag, " '", path, "' cannot be written: ", system_reason());
  ::close(fd);
  ::unlink(probe.c_str());
}

void write_file_atomically(const std::string& wanted_path,
                           const std::function<void(std::ostream&)>& write) {
  const OutputPath place = resolve_output(wanted_path, concat("'", wanted_path, "'"));
  if (place.is_stream) {  // as /dev/stdout: there is nothing to rename onto
    errno = 0;
    std::ofstream stream(wanted_path, std::ios::binary);
    if (stream) {
      write(stream);
      stream.flush();
    }
    TRAINRT_REQUIRE(stream.good(), kIo, "cannot write '", wanted_path, "': ", system_reason());
    return;
  }
  const std::string& path = place.path;
  const std::string temporary = concat(path, ".tmp.", ::getpid());
  const auto fail = [&](const std::string& action) {
    const std::string reason = system_reason();
    ::unlink(temporary.c_str());
    TRAINRT_FAIL(kIo, "cannot ", action, " '", path, "': ", reason);
  };
  errno = 0;
  try {
    std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
    if (!stream) {
      fail("create");
    }
    write(stream);
    stream.flush();
    if (!stream) {
      fail("write");
    }
    stream.close();
    if (!stream) {
      fail("write");
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  const int fd = ::open(temporary.c_str(), O_RDONLY);
  if (fd < 0 || ::fsync(fd) != 0) {
    if (fd >= 0) {
      ::close(fd);
    }
    fail("sync");
  }
  ::close(fd);
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    fail("rename to");
  }
  sync_folder(fs::path(path).parent_path().string());
}

}  // namespace trainrt
