#include "runtime/checkpoint_manifest.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/base/json.h"
#include "runtime/file_bytes.h"

namespace trainrt {

using Json = nlohmann::ordered_json;
using Entry = CheckpointManifest::Entry;
using Piece = CheckpointManifest::Piece;

namespace {

constexpr int64_t kOldestFormat = 1;  // without a check sum
constexpr int64_t kFormat = 2;
constexpr const char* kCheckSum = "crc32";

// Of the contents: line breaks and indentation may differ.
uint32_t check_sum(Json manifest) {
  manifest.erase(kCheckSum);
  const std::string text = manifest.dump();
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

// JSON is UTF-8, a path among the settings need not be: what is not is replaced.
Json text_of(const std::map<std::string, std::string>& settings) {
  return Json::parse(Json(settings).dump(-1, ' ', false, Json::error_handler_t::replace));
}

const Json& value_at(const Json& item, const char* key) {
  const auto found = item.is_object() ? item.find(key) : item.end();
  TRAINRT_REQUIRE(found != item.end(),
                  kIo,
                  "its manifest is damaged: '",
                  key,
                  "' is missing in ",
                  json_excerpt(item));
  return *found;
}

void require_kind(bool fits, const Json& value, const char* key, const char* wanted) {
  TRAINRT_REQUIRE(fits,
                  kIo,
                  "its manifest is damaged: '",
                  key,
                  "' holds ",
                  json_excerpt(value),
                  ", wanted ",
                  wanted);
}

std::string text_in(const Json& value, const char* key) {
  require_kind(value.is_string(), value, key, "a string");
  return value.get<std::string>();
}

std::string text_at(const Json& item, const char* key) {
  return text_in(value_at(item, key), key);
}

const Json& list_at(const Json& item, const char* key) {
  const Json& value = value_at(item, key);
  require_kind(value.is_array(), value, key, "a list");
  return value;
}

int64_t integer(const Json& value, const char* key) {
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() ||
       value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  require_kind(fits, value, key, "a whole number of 64 bits");
  return value.get<int64_t>();
}

int64_t count(const Json& value, const char* key) {
  const int64_t number = integer(value, key);
  TRAINRT_REQUIRE(number >= 0,
                  kIo,
                  "its manifest is damaged: '",
                  key,
                  "' holds ",
                  number,
                  ", wanted 0 or more");
  return number;
}

int64_t count_at(const Json& item, const char* key) {
  return count(value_at(item, key), key);
}

Shape dims_at(const Json& item, const char* key) {
  Shape dims;
  for (const Json& dim : list_at(item, key)) {
    dims.push_back(count(dim, key));
  }
  return dims;
}

void check_format(const Json& manifest) {
  const int64_t format = integer(value_at(manifest, "format"), "format");
  TRAINRT_REQUIRE(format >= kOldestFormat && format <= kFormat,
                  kIo,
                  "its format is ",
                  format,
                  ", this build reads ",
                  kOldestFormat,
                  " to ",
                  kFormat);
  if (format == kOldestFormat && !manifest.contains(kCheckSum)) {
    return;
  }
  TRAINRT_REQUIRE(count_at(manifest, kCheckSum) == int64_t{check_sum(manifest)},
                  kIo,
                  "its manifest is damaged (check sum)");
}

TrainingPosition read_position(const Json& manifest) {
  TrainingPosition position;
  position.step = count_at(manifest, "step");
  position.skipped = count_at(manifest, "skipped");
  position.position = count_at(manifest, "position");
  position.seed = integer(value_at(manifest, "seed"), "seed");
  const Json& loss_scale = value_at(manifest, "loss_scale");
  require_kind(loss_scale.is_number(), loss_scale, "loss_scale", "a number");
  position.loss_scale = loss_scale.get<double>();
  position.finite_steps = count_at(manifest, "finite_steps");
  position.model_hash = text_at(manifest, "model_hash");
  if (manifest.contains("settings")) {
    const Json& settings = manifest.at("settings");
    require_kind(settings.is_object(), settings, "settings", "an object");
    for (const auto& [name, value] : settings.items()) {
      position.settings[name] = text_in(value, "settings");
    }
  }
  TRAINRT_REQUIRE(std::isfinite(position.loss_scale) && position.loss_scale > 0,
                  kIo,
                  "its manifest is damaged: 'loss_scale' holds ",
                  position.loss_scale);
  return position;
}

std::map<std::string, CheckpointManifest::File> read_files(const Json& manifest) {
  std::map<std::string, CheckpointManifest::File> files;
  for (const Json& item : list_at(manifest, "files")) {
    const std::string name = text_at(item, "name");
    const int64_t crc = count_at(item, "crc32");
    TRAINRT_REQUIRE(crc <= std::numeric_limits<uint32_t>::max(),
                    kIo,
                    "its manifest is damaged: the check sum of file ",
                    name,
                    " is no 32-bit number");
    const bool is_new =
        files.insert({name, {count_at(item, "bytes"), static_cast<uint32_t>(crc)}}).second;
    TRAINRT_REQUIRE(is_new, kIo, "its manifest is damaged: file ", name, " is listed twice");
  }
  return files;
}

// Adds one piece to the tensor that it is of.
void read_piece(const Json& item, CheckpointManifest& manifest) {
  const std::string name = text_at(item, "name");
  const std::string dtype_text = text_at(item, "dtype");
  const auto dtype = dtype_from_name(dtype_text);
  TRAINRT_REQUIRE(dtype.has_value(), kIo, "its dtype '", dtype_text, "' is unknown");
  const Shape shape = dims_at(item, "shape");
  const auto [at, is_first] = manifest.tensors.insert({name, {*dtype, shape, {}}});
  TRAINRT_REQUIRE(is_first || (at->second.dtype == *dtype && at->second.shape == shape),
                  kIo,
                  "its pieces of '",
                  name,
                  "' disagree: ",
                  dtype_text,
                  shape_string(shape),
                  " and ",
                  dtype_name(at->second.dtype),
                  shape_string(at->second.shape));
  at->second.pieces.push_back({text_at(item, "file"),
                               dims_at(item, "offset"),
                               dims_at(item, "piece"),
                               count_at(item, "begin")});
}

void check_in_bounds(const std::string& name,
                     const Entry& entry,
                     const Piece& piece,
                     const std::map<std::string, CheckpointManifest::File>& files) {
  bool inside =
      piece.offset.size() == entry.shape.size() && piece.shape.size() == entry.shape.size();
  for (size_t d = 0; inside && d < entry.shape.size(); ++d) {
    inside =
        piece.offset[d] <= entry.shape[d] && piece.shape[d] <= entry.shape[d] - piece.offset[d];
  }
  TRAINRT_REQUIRE(inside,
                  kIo,
                  "its piece ",
                  shape_string(piece.shape),
                  " at ",
                  shape_string(piece.offset),
                  " of '",
                  name,
                  "' does not lie in the tensor's ",
                  shape_string(entry.shape));
  const auto file = files.find(piece.file);
  TRAINRT_REQUIRE(file != files.end(),
                  kIo,
                  "a piece of '",
                  name,
                  "' is in file ",
                  piece.file,
                  ", which it does not list");
  const int64_t bytes = file->second.bytes;
  TRAINRT_REQUIRE(piece.begin <= bytes &&
                      num_elements(piece.shape) <= (bytes - piece.begin) / dtype_bytes(entry.dtype),
                  kIo,
                  "its piece ",
                  shape_string(piece.shape),
                  " of '",
                  name,
                  "' at byte ",
                  piece.begin,
                  " goes beyond the ",
                  bytes,
                  " bytes of file ",
                  piece.file);
}

bool overlap(const Piece& a, const Piece& b) {
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (std::max(a.offset[d], b.offset[d]) >=
        std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d])) {
      return false;
    }
  }
  return true;
}

// Pieces in bounds that are as large together as the tensor and do not overlap are the tensor.
void check_cover(const std::string& name, const Entry& entry) {
  int64_t covered = 0;
  std::vector<Piece> pieces;
  for (const Piece& piece : entry.pieces) {
    if (const int64_t elements = num_elements(piece.shape); elements > 0) {
      covered += elements;
      pieces.push_back(piece);
    }
  }
  const int64_t wanted = num_elements(entry.shape);
  TRAINRT_REQUIRE(covered == wanted,
                  kIo,
                  "its pieces hold ",
                  covered,
                  " elements of '",
                  name,
                  "', wanted ",
                  wanted);
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.offset < b.offset;
  });
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (size_t j = i + 1; j < pieces.size(); ++j) {
      TRAINRT_REQUIRE(!overlap(pieces[i], pieces[j]),
                      kIo,
                      "its pieces of '",
                      name,
                      "' at ",
                      shape_string(pieces[i].offset),
                      " and ",
                      shape_string(pieces[j].offset),
                      " overlap");
      if (pieces[j].offset[0] >= pieces[i].offset[0] + pieces[i].shape[0]) {
        break;  // as do all that follow
      }
    }
  }
}

}  // namespace

void write_manifest(const std::string& folder,
                    const TrainingPosition& position,
                    const std::vector<Json>& parts) {
  Json manifest = {{"format", kFormat},
                   {"step", position.step},
                   {"skipped", position.skipped},
                   {"position", position.position},
                   {"seed", position.seed},
                   {"loss_scale", position.loss_scale},
                   {"finite_steps", position.finite_steps},
                   {"model_hash", position.model_hash},
                   {"settings", text_of(position.settings)}};
  Json files = Json::array();
  Json tensors = Json::array();
  for (const Json& part : parts) {
    files.push_back({{"name", part["file"]}, {"bytes", part["bytes"]}, {"crc32", part["crc32"]}});
    for (const Json& piece : part["pieces"]) {
      tensors.push_back(piece);
    }
  }
  manifest["files"] = files;
  manifest["tensors"] = tensors;
  manifest[kCheckSum] = check_sum(manifest);
  write_file_atomically(folder + "/manifest.json",
                        [&](std::ostream& out) { out << manifest.dump(1) << "\n"; });
}

CheckpointManifest read_manifest(const std::string& folder) {
  const std::vector<std::byte> bytes = read_file(folder + "/manifest.json");
  CheckpointManifest manifest;
  try {
    const Json json = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                                 "its manifest is damaged: it",
                                 ErrorCode::kIo);
    check_format(json);
    manifest.position = read_position(json);
    manifest.files = read_files(json);
    for (const Json& item : list_at(json, "tensors")) {
      read_piece(item, manifest);
    }
    for (const auto& [name, entry] : manifest.tensors) {
      for (const Piece& piece : entry.pieces) {
        check_in_bounds(name, entry, piece, manifest.files);
      }
      check_cover(name, entry);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) {
      throw;
    }
    TRAINRT_FAIL(kIo, "its manifest is damaged (", error.message(), ")");  // a shape that is none
  }
  return manifest;
}

}  // namespace trainrt
