// A checkpoint's manifest.json: where training stood, which files belong to it, and which bytes of
// them are which part of which tensor.
//
// A damaged manifest must never become other weights: it carries a check sum, and whatever that
// says, every piece is checked against its tensor, and together they cover it exactly once.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "graph/shape.h"

namespace trainrt {

// Where training stood.
struct TrainingPosition {
  int64_t step = 0;      // steps done, skipped ones included
  int64_t skipped = 0;   // steps without an update: the gradient was not finite
  int64_t position = 0;  // global sample count
  int64_t seed = 0;
  double loss_scale = 1;
  int64_t finite_steps = 0;  // since the loss scale last changed
  std::string model_hash;
  // The run's settings by option, for whoever continues with others; empty in old checkpoints.
  std::map<std::string, std::string> settings;
};

struct CheckpointManifest {
  struct File {
    int64_t bytes = 0;
    uint32_t crc32 = 0;
  };
  struct Piece {
    std::string file;
    Shape offset;  // in the whole tensor
    Shape shape;
    int64_t begin = 0;  // of its bytes in the file
  };
  struct Entry {
    DType dtype = DType::kFloat32;
    Shape shape;
    std::vector<Piece> pieces;
  };

  TrainingPosition position;
  std::map<std::string, File> files;
  std::map<std::string, Entry> tensors;
};

// Writes `folder`/manifest.json. A part is what one rank stored:
// {"file", "bytes", "crc32", "pieces": [{"name", "dtype", "shape", "offset", "piece", "file",
// "begin"}]}. Throws kIo.
void write_manifest(const std::string& folder,
                    const TrainingPosition& position,
                    const std::vector<nlohmann::ordered_json>& parts);

// Reads `folder`/manifest.json and checks it in itself; the files it names are not opened. Throws
// kIo saying what is wrong with it.
CheckpointManifest read_manifest(const std::string& folder);

}  // namespace trainrt
