// Samples by number. A dataset is a set of named arrays with one entry per sample; it never changes
// and may be read from several threads.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "graph/shape.h"
#include "graph/tensor.h"

namespace trainrt {

struct DataArray {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape sample_shape;      // without the batch axis
  bool is_labels = false;  // known to be labels (IDX label file, shifted tokens)
};

// num_samples() of a source that never ends (synthetic).
inline constexpr int64_t kEndlessSamples = std::numeric_limits<int64_t>::max();

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::string description() const = 0;  // for messages: the file or folder
  virtual int64_t num_samples() const = 0;
  virtual const std::vector<DataArray>& arrays() const = 0;
  // Writes sample `index` of arrays()[array] to `out`, dense.
  virtual void read(int array, int64_t index, std::byte* out) const = 0;
  // The characters that tokens number, in order, as UTF-8; empty where tokens are no characters.
  virtual std::string alphabet() const { return ""; }

  std::optional<int> find_array(const std::string& name) const;
};

// Arrays held in memory; `batch_axes[i]` enumerates the samples of array i.
std::unique_ptr<Dataset> make_memory_dataset(std::string description,
                                             std::vector<DataArray> arrays,
                                             std::vector<Tensor> tensors,
                                             std::vector<int> batch_axes);

// Each throws kIo when a file cannot be read and kInvalidArgument when its contents are wrong,
// naming the file.

// A model's input whose samples do not lie along axis 0.
struct InputLayout {
  int batch_axis = 0;
  Shape sample_shape;  // -1 for a symbolic dim
};

// `batch_axes`: array name -> axis, 0 for arrays not named. `inputs`: by name; an array of an
// input's name lies as the input does, unless its sizes fit with samples along axis 0 only.
// `in_use`: names of arrays that are read: where there are such, arrays of another number of
// samples are left out.
std::unique_ptr<Dataset> open_npz(const std::string& path,
                                  const std::map<std::string, int>& batch_axes,
                                  const std::map<std::string, InputLayout>& inputs = {},
                                  const std::set<std::string>& in_use = {});

// A folder with `<prefix>-images-idx*-ubyte` and `<prefix>-labels-idx*-ubyte`, plain or .gz;
// `prefix` is "train" or "t10k".
std::unique_ptr<Dataset> open_idx_folder(const std::string& folder, const std::string& prefix);

// Consecutive windows of `sequence` tokens as array "tokens"; "labels" are the tokens that follow.
// nanoGPT (bare uint16) or llm.c (1 KiB header) files.
std::unique_ptr<Dataset> open_token_file(const std::string& path, int64_t sequence);
// The same over the characters (Unicode code points) of a text, numbered as in `alphabet` (UTF-8)
// or, when that is empty, in ascending order. Throws kInvalidArgument for other characters.
std::unique_ptr<Dataset> open_text_file(const std::string& path,
                                        int64_t sequence,
                                        const std::string& alphabet);

}  // namespace trainrt
