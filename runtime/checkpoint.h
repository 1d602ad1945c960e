// Checkpoints: D/step-00000012/ holds safetensors files and manifest.json. Tensors are whole
// logical tensors, cut into pieces with global offsets, so that any plan loads any checkpoint.
//
// A checkpoint is written under a temporary name; each file is synced, the manifest comes last, and
// then the folder is renamed: what bears the name step-N is complete unless the disk lost it later,
// which the manifest's sizes and check sums reveal, its own among them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/tensor.h"
#include "parallel/communicator.h"
#include "runtime/checkpoint_manifest.h"

namespace trainrt {

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
  // when there is none; throws kIo when all there are are broken.
  static std::optional<Checkpoint> newest(const std::string& folder);

  const std::string& path() const { return path_; }
  const TrainingPosition& position() const { return manifest_.position; }
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return manifest_.tensors.count(name) != 0; }
  DType dtype(const std::string& name) const { return manifest_.tensors.at(name).dtype; }
  // The whole tensor. Throws kInvalidArgument when the checkpoint lacks it.
  Tensor read(const std::string& name) const;

 private:
  // Throws kIo saying what is wrong with it.
  static Checkpoint open(const std::string& path);

  std::string path_;
  CheckpointManifest manifest_;
};

// Removes what a killed run left half written.
void remove_unfinished_checkpoints(const std::string& folder);

// Removes all but the newest `keep` checkpoints up to `saved`, the step just saved, and never
// `in_use` (a Checkpoint's path), which is still read from. Later ones were passed over as broken
// and count for nothing. What cannot be removed stays, with a warning.
void remove_old_checkpoints(const std::string& folder,
                            int64_t saved,
                            int64_t keep,
                            const std::string& in_use);

// Steps of the checkpoints in `folder`, complete or not, ascending.
std::vector<int64_t> checkpoint_steps(const std::string& folder);

}  // namespace trainrt
