// Checkpoints: D/step-00000012/ holds safetensors files and manifest.json. Tensors are whole
// logical tensors, cut into pieces with global offsets, so that any plan loads any checkpoint.
//
// A checkpoint is written under a temporary name; each file is synced, the manifest comes last, and
// then the folder is renamed: what bears the name step-N is complete unless the disk lost it later,
// which the manifest's sizes and check sums reveal.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/tensor.h"
#include "parallel/communicator.h"

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

struct CheckpointTensor {
  std::string name;
  Shape shape;   // of the whole tensor
  Shape offset;  // of this piece
  Tensor data;
};

// Writes D/step-N. Every rank of `world` (null: one rank) calls with the pieces it is to store,
// which are fetched one at a time. Throws kIo; no half checkpoint is left under the final name.
void write_checkpoint(const std::string& folder,
                      const TrainingPosition& position,
                      const std::vector<std::string>& names,
                      const std::function<CheckpointTensor(const std::string&)>& fetch,
                      Communicator* world);

class Checkpoint {
 public:
  // The newest complete checkpoint in `folder`; broken ones are passed over with a warning. Nothing
  // when there is none.
  static std::optional<Checkpoint> newest(const std::string& folder);

  const std::string& path() const { return path_; }
  const TrainingPosition& position() const { return position_; }
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return entries_.count(name) != 0; }
  // The whole tensor. Throws kInvalidArgument when the checkpoint lacks it or a part of it.
  Tensor read(const std::string& name) const;

 private:
  struct Piece {
    std::string file;
    Shape offset;
    Shape shape;
    int64_t begin = 0;  // of its bytes in the file
  };
  struct Entry {
    DType dtype = DType::kFloat32;
    Shape shape;
    std::vector<Piece> pieces;
  };
  // Throws kIo saying what is wrong with it.
  static Checkpoint open(const std::string& path);

  std::string path_;
  TrainingPosition position_;
  std::map<std::string, Entry> entries_;
};

// Removes what a killed run left half written.
void remove_unfinished_checkpoints(const std::string& folder);

// Removes all but the newest `keep` checkpoints, and never `in_use` (a Checkpoint's path), which is
// still read from. Called after a save, so the newest one is complete. What cannot be removed
// stays, with a warning.
void remove_old_checkpoints(const std::string& folder, int64_t keep, const std::string& in_use);

// Steps of the checkpoints in `folder`, complete or not, ascending.
std::vector<int64_t> checkpoint_steps(const std::string& folder);

}  // namespace trainrt
