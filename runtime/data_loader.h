// Turns samples into the tensors that each step's micro-batches are fed with, one step ahead on a
// thread of its own, which others may help. The order of samples is a pure function of (seed,
// epoch); the loader's only state is the global sample count.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "graph/graph.h"
#include "parallel/program.h"
#include "runtime/dataset.h"

namespace trainrt {

// What an integer may be: [low, high), or `also`.
struct ValueRange {
  int64_t low = 0, high = 0;
  std::optional<int64_t> also = std::nullopt;
};

// How one graph input is filled. Integers become the wanted integer type; uint8 becomes float by a
// division by 255; samples are reshaped to the input's dims without the batch.
struct InputBinding {
  std::string input;
  int array = 0;
  DType dtype = DType::kFloat32;
  Shape sample_shape;
  int batch_axis = 0;
  int token_axis = -1;  // of the sample: cut to the micro-batch's length, if that has one
  // Labels, which count nothing past the sample's own tokens: they take this value there.
  std::optional<int64_t> past_end = std::nullopt;
  std::optional<ValueRange> range = std::nullopt;  // of classes and indices, where it is known
  bool probabilities = false;  // targets of bce_with_logits: numbers from 0 to 1
};

// Pairs an input with the array that fills it. Throws kInvalidArgument, naming both with their
// types, when dtype or number of elements do not fit.
InputBinding bind_input(const Value& input, const Dataset& dataset, int array);

// Whether one shape has the dims of the other in another order, those of 1 aside: what is read as
// if it had the other's would be scrambled.
bool is_permuted(const Shape& a, const Shape& b);

// One step's data.
struct StepData {
  int64_t position = 0;                // global sample count before the step
  int64_t num_samples = 0;             // of all ranks
  std::vector<int64_t> samples;        // their numbers in the dataset; MicroBatch::first_sample
                                       // is an index into it
  StepWork work;                       // of this rank; cells with --max-tokens only
  int64_t tokens = 0;                  // of all samples, where they are counted
  std::vector<int64_t> padded_tokens;  // and with their padding, by data rank
  std::vector<std::vector<Tensor>> inputs;  // [micro-batch of this rank][binding]
};

struct LoaderOptions {
  uint64_t seed = 0;
  bool shuffle = true;
  int64_t batch = 32;
  int64_t start = 0;  // global sample count to begin at
  int64_t stop = 0;   // and to end at
  // Tokens of each sample of the dataset, for bindings with `past_end`; null: unknown.
  std::function<int64_t(int64_t sample)> length_of = nullptr;
  // Makes the tensors, on the loader's thread; null: in plain memory. They are filled again and
  // again.
  std::function<Tensor(DType dtype, const Shape& shape)> make_tensor = nullptr;
  int threads = 1;     // that read samples, where there is much to read
  bool peeks = false;  // the step after is looked at while one runs, and the loader ahead of both
};

class DataLoader {
 public:
  // Fills in this rank's work in a step of given samples, which it may reorder. Called from the
  // loader's thread.
  using Arrange = std::function<void(StepData& step)>;

  DataLoader(std::shared_ptr<const Dataset> dataset,
             std::vector<InputBinding> bindings,
             LoaderOptions options,
             Arrange arrange);
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // The next step's data, valid until the next call; null at the end. Rethrows the thread's error.
  const StepData* next();
  // What next() will return, valid as long as that; what next() has returned stays valid too. Wants
  // LoaderOptions::peeks.
  const StepData* peek();

 private:
  void await_ready(std::unique_lock<std::mutex>& lock);
  void produce();
  void choose_samples(StepData& data) const;
  void fill(StepData& data) const;
  void make_tensors(StepData& data) const;

  std::shared_ptr<const Dataset> dataset_;
  std::vector<InputBinding> bindings_;
  LoaderOptions options_;
  Arrange arrange_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<StepData>> ready_;
  std::deque<std::unique_ptr<StepData>> spare_;  // buffers to be filled anew
  std::unique_ptr<StepData> current_;
  std::exception_ptr error_;
  bool finished_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trainrt
