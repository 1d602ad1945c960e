// The part of a rank that writes the trained model. Rank 0 does, from what all ranks hold.
#include <filesystem>
#include <map>
#include <set>

#include "graph/base/log.h"
#include "graph/onnx_export.h"
#include "graph/passes/precision.h"
#include "runtime/rank_runner.h"
#include "runtime/text_alphabet.h"

namespace trainrt {

// With several ranks the pieces meet in a checkpoint beside the file, which rank 0 reads.
void RankRunner::export_model() {
  const std::string parts = run_.options.export_file + ".parts";
  std::function<Tensor(const std::string&)> whole = [&](const std::string& name) {
    return store_.piece(name).data;
  };
  std::optional<Checkpoint> gathered;
  if (world_ != nullptr) {
    write_checkpoint(
        parts,
        {},
        store_.owned_names(),
        [&](const std::string& name) { return store_.piece(name); },
        world_);
  }
  if (rank_ != 0) {
    return;
  }
  if (world_ != nullptr) {
    gathered = Checkpoint::newest(parts);
    TRAINRT_CHECK(gathered.has_value());
    whole = [&](const std::string& name) { return gathered->read(name); };
  }
  // The file also has constants, which no rank holds: they stay as they are.
  const std::vector<std::string> names = gathered ? gathered->names() : store_.names();
  const std::set<std::string> held(names.begin(), names.end());
  std::vector<std::string> beyond;  // the range of their type in the file
  std::map<std::string, std::string> metadata;
  if (const std::string alphabet = run_.job.dataset->alphabet(); !alphabet.empty()) {
    metadata[kAlphabetKey] = alphabet;
  }
  export_trained(
      *run_.job.model,
      [&](const std::string& name) {
        const bool carried = run_.checkpoint && run_.checkpoint->has(name);
        if (held.count(name) == 0 && !carried) {
          return Tensor();
        }
        const auto type = run_.job.model_types.find(name);
        const Tensor value = held.count(name) != 0 ? whole(name) : run_.checkpoint->read(name);
        if (type == run_.job.model_types.end() || type->second.dtype == value.dtype()) {
          return value;
        }
        const Tensor stored = value.cast(type->second.dtype);
        if (has_overflowed(value, stored)) {
          beyond.push_back(name);
        }
        return stored;
      },
      metadata,
      run_.options.export_file);
  if (!beyond.empty()) {
    log_warning(
        run_.options.export_file,
        " holds infinity where the model trained, in ",
        beyond.size() > 1 ? concat(beyond.size(), " tensors from ") : "",
        "'",
        beyond.front(),
        "', a number beyond the range of the type in which the file stores it (",
        dtype_name(run_.job.model_types.at(beyond.front()).dtype),
        "); train a float32 copy of the model, for which --checkpoint-dir keeps all digits");
  }
  std::error_code ignored;
  std::filesystem::remove_all(parts, ignored);
}

}  // namespace trainrt
