#include "runtime/checkpoint.h"

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "graph/base/log.h"
#include "runtime/file_bytes.h"
#include "runtime/safetensors.h"

namespace trainrt {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

std::string folder_name(int64_t step) {
  char text[32];
  std::snprintf(text, sizeof(text), "step-%08ld", static_cast<long>(step));
  return text;
}

std::string shard_name(int rank, int world_size) {
  char text[64];
  std::snprintf(text, sizeof(text), "tensors-%05d-of-%05d.safetensors", rank, world_size);
  return text;
}

// Copies between a piece and its place in the whole tensor, innermost rows at a time.
void copy_piece(const Shape& whole,
                const Shape& piece,
                const Shape& offset,
                int64_t item,
                const std::byte* from,
                std::byte* to) {
  if (num_elements(piece) == 0) {
    return;
  }
  const int ndim = static_cast<int>(whole.size());
  const int64_t row = ndim == 0 ? 1 : piece.back();
  const Shape strides = row_major_strides(whole);
  Shape index(piece.size(), 0);
  const int64_t rows = num_elements(piece) / std::max<int64_t>(1, row);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t at = 0;
    for (int d = 0; d < ndim; ++d) {
      const auto i = static_cast<size_t>(d);
      at += (offset[i] + index[i]) * strides[i];
    }
    std::memcpy(to + at * item, from + r * row * item, static_cast<size_t>(row * item));
    for (int d = ndim - 2; d >= 0; --d) {
      const auto i = static_cast<size_t>(d);
      if (++index[i] < piece[i]) {
        break;
      }
      index[i] = 0;
    }
  }
}

uint32_t file_crc(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<char> buffer(1 << 20);
  uLong crc = ::crc32(0, nullptr, 0);
  while (stream.read(buffer.data(), static_cast<std::streamsize>(buffer.size())),
         stream.gcount() > 0) {
    crc = ::crc32(
        crc, reinterpret_cast<const Bytef*>(buffer.data()), static_cast<uInt>(stream.gcount()));
  }
  return static_cast<uint32_t>(crc);
}

// One rank's part of the manifest.
Json write_shard(const std::string& folder,
                 const std::string& file,
                 const std::vector<std::string>& names,
                 const std::function<CheckpointTensor(const std::string&)>& fetch) {
  SafetensorsWriter writer(folder + "/" + file);
  Json pieces = Json::array();
  for (const std::string& name : names) {
    const CheckpointTensor tensor = fetch(name);
    writer.add(name, tensor.data);
    pieces.push_back({{"name", name},
                      {"dtype", dtype_name(tensor.data.dtype())},
                      {"shape", tensor.shape},
                      {"offset", tensor.offset},
                      {"piece", tensor.data.shape()},
                      {"file", file}});
  }
  const SafetensorsWriter::Summary summary = writer.finish();
  for (size_t i = 0; i < names.size(); ++i) {
    pieces[i]["begin"] = summary.begins[i];
  }
  return {{"file", file}, {"bytes", summary.bytes}, {"crc32", summary.crc32}, {"pieces", pieces}};
}

// All ranks' parts, on rank 0.
std::vector<Json> gather_parts(const Json& own, Communicator* world) {
  if (world == nullptr || world->world_size() == 1) {
    return {own};
  }
  const std::string text = own.dump();
  const int size = world->world_size();
  std::vector<int64_t> lengths(static_cast<size_t>(size));
  const int64_t length = static_cast<int64_t>(text.size());
  world->all_gather(
      &length, lengths.data(), std::vector<int64_t>(lengths.size(), 1), DType::kInt64);
  int64_t total = 0;
  for (const int64_t n : lengths) {
    total += n;
  }
  std::string all(static_cast<size_t>(total), ' ');
  world->all_gather(text.data(), all.data(), lengths, DType::kUInt8);
  std::vector<Json> parts;
  size_t at = 0;
  for (const int64_t n : lengths) {
    parts.push_back(Json::parse(all.substr(at, static_cast<size_t>(n))));
    at += static_cast<size_t>(n);
  }
  return parts;
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  fs::create_directories(path, error);
  TRAINRT_REQUIRE(!error, kIo, "cannot create folder '", path, "': ", error.message());
}

}  // namespace

void write_checkpoint(const std::string& folder,
                      const TrainingPosition& position,
                      const std::vector<std::string>& names,
                      const std::function<CheckpointTensor(const std::string&)>& fetch,
                      Communicator* world) {
  const int rank = world == nullptr ? 0 : world->rank();
  const int world_size = world == nullptr ? 1 : world->world_size();
  const std::string final_path = folder + "/" + folder_name(position.step);
  const std::string path = final_path + ".tmp";
  if (rank == 0) {
    make_folder(path);
  }
  if (world != nullptr) {
    world->barrier();
  }
  try {
    const Json own = write_shard(path, shard_name(rank, world_size), names, fetch);
    const std::vector<Json> parts = gather_parts(own, world);
    if (rank == 0) {
      write_manifest(path, position, parts);
      std::error_code error;
      fs::remove_all(final_path, error);  // broken: a whole one would have been resumed from
      fs::rename(path, final_path, error);
      TRAINRT_REQUIRE(
          !error, kIo, "cannot rename '", path, "' to '", final_path, "': ", error.message());
      sync_folder(folder);
    }
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(path, ignored);
    throw;
  }
  if (world != nullptr) {
    world->barrier();
  }
}

void remove_unfinished_checkpoints(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> unfinished;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.rfind("step-", 0) == 0 && name.ends_with(".tmp")) {
      unfinished.push_back(entry.path());
    }
  }
  for (const fs::path& path : unfinished) {
    fs::remove_all(path, error);
  }
}

void remove_old_checkpoints(const std::string& folder,
                            int64_t saved,
                            int64_t keep,
                            const std::string& in_use) {
  std::vector<int64_t> steps = checkpoint_steps(folder);
  steps.erase(std::upper_bound(steps.begin(), steps.end(), saved), steps.end());
  for (size_t i = 0; i + static_cast<size_t>(keep) < steps.size(); ++i) {
    const std::string path = folder + "/" + folder_name(steps[i]);
    std::error_code error;
    if (fs::equivalent(path, in_use, error)) {
      continue;
    }
    // Under its final name a checkpoint is whole, though the run be killed meanwhile.
    fs::rename(path, path + ".tmp", error);
    if (!error) {
      fs::remove_all(path + ".tmp", error);
    }
    if (error) {
      log_warning("cannot remove the old checkpoint '", path, "': ", error.message());
    }
  }
}

std::vector<int64_t> checkpoint_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.size() >= 13 && name.rfind("step-", 0) == 0 &&
        name.find_first_not_of("0123456789", 5) == std::string::npos) {
      steps.push_back(std::stoll(name.substr(5, 18)));
    }
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

namespace {

// The files are there, whole, and hold what the manifest says, at the places that it says.
void check_files(const std::string& path, const CheckpointManifest& manifest) {
  std::map<std::string, std::map<std::string, SafetensorsItem>> stored;
  for (const auto& [name, file] : manifest.files) {
    const std::string file_path = path + "/" + name;
    std::error_code error;
    const auto size = fs::file_size(file_path, error);
    TRAINRT_REQUIRE(!error, kIo, "file ", name, " is missing");
    TRAINRT_REQUIRE(static_cast<int64_t>(size) == file.bytes,
                    kIo,
                    "file ",
                    name,
                    " has ",
                    size,
                    " bytes, wanted ",
                    file.bytes);
    TRAINRT_REQUIRE(
        file_crc(file_path) == file.crc32, kIo, "file ", name, " is damaged (check sum)");
    stored[name] = read_safetensors_header(file_path);
  }
  for (const auto& [name, entry] : manifest.tensors) {
    for (const CheckpointManifest::Piece& piece : entry.pieces) {
      auto& items = stored.at(piece.file);
      const auto item = items.find(name);
      TRAINRT_REQUIRE(item != items.end() && item->second.dtype == entry.dtype &&
                          item->second.shape == piece.shape && item->second.begin == piece.begin,
                      kIo,
                      "file ",
                      piece.file,
                      " does not hold ",
                      dtype_name(entry.dtype),
                      shape_string(piece.shape),
                      " of '",
                      name,
                      "' at byte ",
                      piece.begin);
      items.erase(item);
    }
  }
  for (const auto& [file, items] : stored) {
    TRAINRT_REQUIRE(
        items.empty(), kIo, "its manifest lacks '", items.begin()->first, "' of file ", file);
  }
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  checkpoint.manifest_ = read_manifest(path);
  const int64_t step = checkpoint.position().step;
  TRAINRT_REQUIRE(
      fs::path(path).filename() == folder_name(step), kIo, "its manifest is of step ", step);
  check_files(path, checkpoint.manifest_);
  return checkpoint;
}

std::optional<Checkpoint> Checkpoint::newest(const std::string& folder) {
  std::vector<int64_t> steps = checkpoint_steps(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string path = folder + "/" + folder_name(*step);
    try {
      return open(path);
    } catch (const Error& error) {
      log_warning("checkpoint '", path, "' is passed over: ", error.message());
    }
  }
  TRAINRT_REQUIRE(steps.empty(),
                  kIo,
                  "no checkpoint in '",
                  folder,
                  "' is whole (",
                  steps.size(),
                  steps.size() == 1 ? " is" : " are",
                  " broken); restore one, or start anew in another --checkpoint-dir");
  return std::nullopt;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, unused] : manifest_.tensors) {
    names.push_back(name);
  }
  return names;
}

Tensor Checkpoint::read(const std::string& name) const {
  const auto at = manifest_.tensors.find(name);
  TRAINRT_REQUIRE(at != manifest_.tensors.end(),
                  kInvalidArgument,
                  "checkpoint '",
                  path_,
                  "' has no tensor '",
                  name,
                  "'; it comes from another model or optimizer than this run's");
  const CheckpointManifest::Entry& entry = at->second;
  Tensor whole(entry.dtype, entry.shape);
  for (const CheckpointManifest::Piece& piece : entry.pieces) {
    std::ifstream stream(path_ + "/" + piece.file, std::ios::binary);
    Tensor part(entry.dtype, piece.shape);
    stream.seekg(piece.begin);
    stream.read(reinterpret_cast<char*>(part.raw()), part.bytes());
    TRAINRT_REQUIRE(stream.gcount() == part.bytes(),
                    kIo,
                    "cannot read '",
                    name,
                    "' from '",
                    path_,
                    "/",
                    piece.file,
                    "'");
    copy_piece(
        entry.shape, piece.shape, piece.offset, dtype_bytes(entry.dtype), part.raw(), whole.raw());
  }
  return whole;
}

}  // namespace trainrt
