#include "runtime/rank_runner.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>

#include "graph/base/log.h"
#include "parallel/partition.h"
#include "runtime/bad_values.h"
#include "runtime/plan_choice.h"
#include "runtime/signals.h"

namespace trainrt {

namespace {

using Clock = std::chrono::steady_clock;

// Asks all ranks to stop as a signal does, whose numbers are smaller.
constexpr int64_t kOutputFailed = 1024;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

RankRunner::RankRunner(Run& run, int rank, Communicator* world)
    : run_(run),
      rank_(rank),
      world_(world),
      plan_(run.plan),
      compiled_(std::move(run.ranks[static_cast<size_t>(rank)])),
      device_(make_device(run.devices[static_cast<size_t>(rank)])),
      groups_(run.plan, world, *device_),
      executor_(*device_, groups_.communicators(), run.job.input_names),
      store_(executor_, compiled_.programs[0]->pieces),
      stop_question_(world) {
  for (size_t i = 0; i < compiled_.programs.size(); ++i) {
    executor_.add_program(compiled_.programs[i], compiled_.memories[i]);
  }
  executor_.load();
  store_.share_ownership(world_);
  store_.load_initial();
  if (run.checkpoint) {
    store_.load([&](const std::string& name) {
      return run.tensors.fresh.count(name) != 0 ? Tensor() : run.checkpoint->read(name);
    });
  }
  if (run.job.token_batches) {
    weights_ = data_rank_weights(run.options, plan_, run.devices);
  }
  gather_peaks();
}

void RankRunner::gather_peaks() {
  const int64_t own = executor_.arena_bytes();
  peak_bytes_.assign(run_.devices.size(), own);
  if (world_ != nullptr) {
    world_->all_gather(
        &own, peak_bytes_.data(), std::vector<int64_t>(peak_bytes_.size(), 1), DType::kInt64);
  }
}

bool RankRunner::on_gpu() const {
  return device_->context().spec().backend == Backend::kCuda;
}

LoaderOptions RankRunner::loader_options(bool shuffle) const {
  LoaderOptions loader;
  loader.seed = static_cast<uint64_t>(run_.options.seed);
  loader.shuffle = shuffle;
  loader.batch = run_.options.batch_size;
  loader.stop = run_.range.stop;
  loader.peeks = compiled_.programs[0]->runs_on();
  if (on_gpu()) {
    // A GPU takes samples faster than a thread reads them, and leaves the CPU's cores to others.
    constexpr int kMostThreads = 8;
    loader.threads = std::min(kMostThreads, run_.devices[static_cast<size_t>(rank_)].threads);
    loader.make_tensor = [this](DType dtype, const Shape& shape) {
      device_->attach_thread();
      const std::shared_ptr<DeviceBuffer> memory =
          device_->allocate_host(num_elements(shape) * dtype_bytes(dtype));
      return Tensor(dtype, shape, memory, memory->data());
    };
  }
  if (const auto& batches = run_.job.token_batches) {
    loader.length_of = [batches](int64_t sample) { return batches->lengths().at(sample); };
  }
  return loader;
}

std::unique_ptr<DataLoader> RankRunner::make_loader(bool shuffle, int64_t start) const {
  LoaderOptions options = loader_options(shuffle);
  options.start = start;
  return std::make_unique<DataLoader>(
      run_.job.dataset, run_.job.bindings, std::move(options), [this](StepData& step) {
        arrange(step);
      });
}

// This rank's part of a step, on the loader's thread.
void RankRunner::arrange(StepData& step) const {
  const TokenBatches* batches = run_.job.token_batches.get();
  if (batches == nullptr) {
    step.work.micro_batches = compiled_.micro_batches(step.num_samples);
    return;
  }
  std::vector<std::vector<MicroBatch>> dealt = batches->deal(step.samples, weights_);
  step.tokens = 0;
  for (const int64_t sample : step.samples) {
    step.tokens += batches->lengths().at(sample);
  }
  step.padded_tokens.assign(dealt.size(), 0);
  size_t rounds = 0;
  for (size_t rank = 0; rank < dealt.size(); ++rank) {
    rounds = std::max(rounds, dealt[rank].size());
    for (const MicroBatch& micro_batch : dealt[rank]) {
      step.padded_tokens[rank] += padded_tokens(micro_batch, batches->lengths().width);
    }
  }
  const Program& program = *compiled_.programs[0];
  step.work = step_work(
      plan_, program, std::move(dealt[static_cast<size_t>(program.coordinates.data_rank)]), rounds);
}

StepFeed RankRunner::feed_of(const StepData& data, int64_t step) const {
  StepFeed feed;
  feed.seed = static_cast<uint64_t>(run_.options.seed);
  feed.step = step;
  feed.update = step - skipped_;
  feed.learning_rate = schedule_.at(feed.update);
  feed.loss_scale = scaler_.scale();
  feed.skip_overflow = scaler_.active() && !run_.job.from_training_info;
  feed.trains = !run_.job.evaluate;
  feed.inputs = &data.inputs;
  feed.fetches_inputs = on_gpu();
  feed.work = run_.job.token_batches ? &data.work : nullptr;
  return feed;
}

StepResult RankRunner::run_step(const StepData& data, int64_t step, const StepData* next) {
  StepFeed feed = feed_of(data, step), after;
  if (next != nullptr) {
    after = feed_of(*next, step + 1);
    feed.next = &after;
  }
  try {
    const StepResult result =
        executor_.run_step(compiled_.program_of_size.at(data.num_samples), feed);
    if (result.skipped && !std::isfinite(result.loss()) && !bad_value_in(data).empty()) {
      require_finite(result.loss(), "the loss", step, true);  // no loss scale mends the data
    }
    return result;
  } catch (Error& error) {
    if (error.code() == ErrorCode::kNonFinite || error.code() == ErrorCode::kInvalidArgument) {
      for (const StepData* read : {&data, next}) {
        const std::string bad = read == nullptr ? "" : bad_value_in(*read);
        if (!bad.empty()) {
          error.add_context(bad);
          throw;
        }
      }
    }
    blame_weights(error);
    throw;
  }
}

std::string RankRunner::bad_value_in(const StepData& data) const {
  return find_bad_value(*run_.job.dataset, run_.job.bindings, data.samples);
}

// Names a weight that was no number before the step. Running statistics, which the forward of a
// step has changed already and reads none of, are no reason.
void RankRunner::blame_weights(Error& error) const {
  if (error.code() != ErrorCode::kNonFinite) {
    return;
  }
  std::vector<std::string> names = store_.names();
  for (const ProgramVariant& variant : compiled_.programs[0]->variants) {
    for (const StateUpdate& update : variant.graph.updates()) {
      const Value& target = variant.graph.value(update.target);
      const NodeId from = variant.graph.value(update.new_value).producer;
      if (target.kind == ValueKind::kState && from != kNoNode &&
          variant.graph.node(from).region != Region::kUpdate) {
        std::erase(names, target.name);
      }
    }
  }
  const std::string bad = find_bad_weight(
      names, [&](const std::string& name) { return executor_.read_after_failure(name); });
  if (!bad.empty()) {
    error.add_context(bad);
  }
}

bool RankRunner::runs_on(const StepData& data) const {
  const auto program = static_cast<size_t>(compiled_.program_of_size.at(data.num_samples));
  return compiled_.programs[program]->runs_on();
}

bool RankRunner::is_checkpoint_due(int64_t steps_done) const {
  const Options& options = run_.options;
  return !options.checkpoint_dir.empty() && options.checkpoint_every > 0 &&
         steps_done % options.checkpoint_every == 0;
}

// The step after `step`, if its first forwards may run before that ends: alike on all ranks. Null:
// the pipeline is empty between the two.
const StepData* RankRunner::next_in_pipeline(DataLoader& loader,
                                             const StepData& data,
                                             int64_t step) const {
  // Who moves work between the ranks compares their times after each step.
  if (!runs_on(data) || rebalancer_ != nullptr || is_checkpoint_due(step + 1) ||
      stop_question_.asked()) {
    return nullptr;
  }
  const StepData* next = loader.peek();
  return next != nullptr && next->num_samples == data.num_samples ? next : nullptr;
}

// All ranks stop after the same step, whichever process got the signal.
bool RankRunner::asked_to_stop(bool drained) {
  const int first_rank = run_.only_rank.value_or(0);
  const int64_t own = output_error_ ? kOutputFailed : rank_ == first_rank ? stop_signal() : 0;
  const int64_t signal = drained ? stop_question_.decide(own) : stop_question_.pass_on(own);
  const bool stops = drained && signal != 0;
  if (stops && rank_ == first_rank) {
    run_.exit_code =
        signal == kOutputFailed ? exit_code(ErrorCode::kIo) : 128 + static_cast<int>(signal);
  }
  return stops;
}

// What is written beside the training: where that fails, the run ends after this step, its state
// saved, as a disk that is full of metrics is no reason to lose it.
void RankRunner::write_aside(const std::function<void()>& write) {
  try {
    write();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kIo) {
      throw;
    }
    if (!output_error_) {
      output_error_ = error;
    }
  }
}

// On rank 0, when all has been saved that could be: `saved_step` below 0 is none.
void RankRunner::rethrow_output_error(int64_t saved_step, bool exported) const {
  if (!output_error_) {
    return;
  }
  Error error = *output_error_;
  if (saved_step >= 0) {
    error.add_context(concat("the training up to step ",
                             saved_step,
                             " is kept in ",
                             run_.options.checkpoint_dir,
                             "; continue with --resume"));
  }
  if (exported) {
    error.add_context(concat("the trained model is kept in ", run_.options.export_file));
  }
  if (saved_step < 0 && !exported) {
    error.add_context("the training is not kept: --checkpoint-dir DIR would have saved it");
  }
  throw error;
}

void RankRunner::save(int64_t step, int64_t position) {
  TrainingPosition at;
  at.step = step;
  at.skipped = skipped_;
  at.position = position;
  at.loss_scale = scaler_.scale();
  at.finite_steps = scaler_.finite_steps();
  at.seed = run_.options.seed;
  at.model_hash = run_.job.model->hash();
  at.settings = training_settings(run_.options, run_.job);
  note_update_rule(plan_, at.settings);
  std::vector<std::string> names = store_.owned_names();
  if (rank_ == 0) {
    names.insert(names.end(), run_.tensors.carried.begin(), run_.tensors.carried.end());
  }
  try {
    write_checkpoint(
        run_.options.checkpoint_dir,
        at,
        names,
        [&](const std::string& name) { return tensor_to_save(name); },
        world_);
  } catch (Error& error) {
    if (output_error_) {
      error.add_context(concat("after: ", output_error_->message()));
    }
    throw;
  }
  if (rank_ == 0 && run_.options.checkpoint_keep > 0) {
    remove_old_checkpoints(run_.options.checkpoint_dir,
                           step,
                           run_.options.checkpoint_keep,
                           run_.checkpoint ? run_.checkpoint->path() : "");
  }
}

CheckpointTensor RankRunner::tensor_to_save(const std::string& name) const {
  const std::vector<std::string>& carried = run_.tensors.carried;
  if (std::find(carried.begin(), carried.end(), name) == carried.end()) {
    return store_.piece(name);
  }
  CheckpointTensor tensor;
  tensor.name = name;
  tensor.data = run_.checkpoint->read(name);
  tensor.shape = tensor.data.shape();
  tensor.offset.assign(tensor.shape.size(), 0);
  return tensor;
}

void RankRunner::report(const StepData& data,
                        const StepResult& result,
                        int64_t step,
                        double seconds) {
  StepMetrics m;
  m.step = step + 1;
  m.loss = std::isnan(result.loss()) ? std::nan("") : result.loss();  // without a sign
  // A model's own training_info may have its own, which nobody can tell from outside.
  m.lr = run_.job.reads_learning_rate ? schedule_.at(step - skipped_)
                                      : std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = result.grad_norm;
  m.samples = data.num_samples;
  m.step_seconds = seconds;
  m.peak_bytes = peak_bytes_;
  m.position = data.position + data.num_samples;
  const int64_t n = run_.job.dataset->num_samples();
  m.loss_scale = scaler_.active() ? scaler_.scale() : 0;
  m.skipped = result.skipped;
  m.tokens = data.tokens;
  m.padded_tokens = data.padded_tokens;
  if (rebalancer_) {
    m.shares = rebalancer_->units();
  }
  m.epoch = n == kEndlessSamples ? 0 : static_cast<double>(m.position) / static_cast<double>(n);
  if (metrics_) {
    write_aside([&] { metrics_->write(m); });
  }
  progress_->show(m);
}

// A loss is a mean over items; without one there is nothing to learn from or to report.
void require_items(const StepResult& result, const std::string& where) {
  TRAINRT_REQUIRE(result.item_count > 0,
                  kInvalidArgument,
                  where,
                  "no item counts: every label is ignored (-100). Look at the labels, or take a "
                  "larger --batch-size");
}

void RankRunner::train() {
  const Options& options = run_.options;
  schedule_ = {lr_schedule_from_name(options.lr_schedule),
               options.lr,
               options.warmup_steps,
               run_.range.total_steps};
  if (run_.job.precision == "fp16") {
    scaler_ = LossScaler({options.init_scale,
                          options.growth_factor,
                          options.backoff_factor,
                          options.growth_interval});
  }
  if (run_.checkpoint) {
    const TrainingPosition& from = run_.checkpoint->position();
    const auto trained_in = from.settings.find("precision");
    if (trained_in == from.settings.end() || trained_in->second == "fp16") {  // else it had none
      scaler_.restore(from.loss_scale, from.finite_steps);
    }
    skipped_ = from.skipped;
  }
  if (rank_ == 0) {
    if (!options.metrics.empty()) {
      metrics_ = std::make_unique<MetricsFile>(options.metrics,
                                               run_.checkpoint ? run_.range.first_step : -1);
    }
    progress_ = std::make_unique<Progress>(run_.range.total_steps);
  }
  if (!options.trace.empty()) {
    trace_ = std::make_unique<RunTrace>(options.trace, plan_, world_);
    executor_.set_trace(&trace_->recorder());
  }
  rebalancer_ = make_rebalancer();
  std::unique_ptr<DataLoader> loader = make_loader(true, run_.range.start);
  const Clock::time_point begin = Clock::now();
  int64_t step = run_.range.first_step;
  int64_t position = run_.range.start;
  int64_t saved_step = run_.checkpoint ? step : -1;
  double loss = std::nan("");
  bool stopped = false;
  while (const StepData* data = loader->next()) {
    const Clock::time_point start = Clock::now();
    if (step + 1 == options.profile_first) {
      device_->profile(true);
    }
    const StepData* next = next_in_pipeline(*loader, *data, step);
    const bool drained = next == nullptr;
    const StepResult result = run_step(*data, step, next);
    if (step + 1 == options.profile_last) {
      device_->profile(false);
    }
    if (rank_ == 0 || !runs_on(*data)) {
      require_items(result, concat("step ", step + 1, ": "));
    }
    loss = std::isfinite(result.loss()) ? result.loss() : loss;
    if (rank_ == 0) {
      report(*data, result, step, seconds_since(start));
    }
    if (trace_) {
      write_aside([&] { trace_->end_step(step + 1, drained); });
    }
    try {
      scaler_.update(result.skipped);
    } catch (Error& error) {
      blame_weights(error);
      throw;
    }
    skipped_ += result.skipped ? 1 : 0;
    ++step;
    position = data->position + data->num_samples;
    stopped = asked_to_stop(drained);
    const std::optional<std::vector<int64_t>> units = new_units(*data, step - 1);
    if (is_checkpoint_due(step) || (stopped && !options.checkpoint_dir.empty())) {
      save(step, position);
      saved_step = step;
    }
    if (stopped) {
      break;
    }
    if (units && position < run_.range.stop) {
      loader.reset();  // it works ahead, for the shares that were
      take_units(units, step);
      loader = make_loader(true, position);
    }
  }
  if (!options.checkpoint_dir.empty() && saved_step != step) {
    save(step, position);
    saved_step = step;
  }
  if (!options.export_file.empty() && !stopped) {
    export_model();
  }
  // What it began from is not read any more.
  if (rank_ == 0 && run_.checkpoint && options.checkpoint_keep > 0 && saved_step == step &&
      step > run_.range.first_step) {
    remove_old_checkpoints(options.checkpoint_dir, step, options.checkpoint_keep, "");
  }
  std::string spent;
  if (trace_) {
    write_aside([&] { spent = trace_->finish(); });
  }
  if (rank_ != 0) {
    return;
  }
  progress_->finish();
  const int64_t run_skipped =
      skipped_ - (run_.checkpoint ? run_.checkpoint->position().skipped : 0);
  rethrow_output_error(saved_step, !options.export_file.empty() && !stopped);
  if (run_skipped > 0 && run_skipped == step - run_.range.first_step) {
    log_warning(
        "nothing has been trained: the loss or the gradient of every step was beyond "
        "float16's range; train more steps, in which the loss scale shrinks, or try "
        "--precision bf16");
  }
  const double seconds = seconds_since(begin);
  const double samples = static_cast<double>(position - run_.range.start);
  if (step == run_.range.first_step && !stopped) {
    std::printf("nothing left to train: %" PRId64 " of %" PRId64 " steps are done\n",
                step,
                run_.range.total_steps);
  } else {
    std::printf("%s %" PRId64 " steps (%.0f samples) in %.1f s: %.0f samples/s, last loss %.6g\n",
                stopped ? "stopped after" : "trained",
                step - run_.range.first_step,
                samples,
                seconds,
                samples / std::max(seconds, 1e-9),
                loss);
  }
  if (saved_step >= 0 && !options.checkpoint_dir.empty()) {
    std::printf("checkpoint of step %" PRId64 " in %s%s\n",
                saved_step,
                options.checkpoint_dir.c_str(),
                stopped ? "; continue with --resume" : "");
  }
  if (!options.export_file.empty() && !stopped) {
    std::printf("wrote %s\n", options.export_file.c_str());
  }
  if (trace_) {
    std::printf("%swrote %s\n", spent.c_str(), options.trace.c_str());
  }
}

StepResult RankRunner::evaluate() {
  std::unique_ptr<DataLoader> loader = make_loader(false, run_.range.start);
  StepResult sum;
  int64_t step = 0;
  while (const StepData* data = loader->next()) {
    const StepResult result = run_step(*data, step++);
    sum.loss_sum += result.loss_sum;
    sum.item_count += result.item_count;
    sum.correct += result.correct;
    sum.has_correct = result.has_correct;
    if (asked_to_stop()) {
      break;
    }
  }
  return sum;
}

}  // namespace trainrt
