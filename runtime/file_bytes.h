// Whole files, plain or compressed, and files that appear under their name only when complete.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace trainrt {

// The contents of a file. Throws kIo with the system's reason.
std::vector<std::byte> read_file(const std::string& path);

// The same; a file that starts as gzip is inflated. Throws kInvalidArgument when it is damaged.
std::vector<std::byte> read_maybe_gzip(const std::string& path);

// Inflates a raw deflate stream (a zip entry) of known size.
std::vector<std::byte> inflate_raw(const std::byte* data,
                                   size_t bytes,
                                   size_t inflated_bytes,
                                   const std::string& what);

// Throws kIo, naming `flag`, when a file `path` could not be written: to be told before hours of
// work, not after.
void require_writable(const std::string& path, const std::string& flag);

// Calls `write` on a stream to a temporary file beside `path`, syncs it and renames it to `path`:
// whoever looks sees the old contents or the new, even after a crash. Throws kIo (disk full, not
// writable) and removes the temporary file.
void write_file_atomically(const std::string& path,
                           const std::function<void(std::ostream&)>& write);

// stdout or stderr where `path` is what they are, a file too (`> log`): one stream then writes all,
// where two would write over each other. Null for any other path.
std::ostream* standard_stream(const std::string& path);

// Holds a folder for one run of this machine, until it is destroyed or the process ends.
class FolderLock {
 public:
  // Throws kIo, in words that begin with `what`, when another run holds the folder. A file system
  // that knows no locks holds nothing.
  FolderLock(const std::string& path, const std::string& what);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
};

// Makes a folder's entries durable.
void sync_folder(const std::string& path);

}  // namespace trainrt
