#include "tests/support/run_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>

#include "graph/evaluator.h"
#include "parallel/memory_plan.h"
#include "parallel/thread_communicator.h"
#include "runtime/device.h"
#include "runtime/executor.h"

namespace trainrt::testing {

namespace {

Tensor samples_of(const Tensor& batch, const MicroBatch& micro_batch) {
  Shape shape = batch.shape();
  const int64_t row = batch.bytes() / shape.at(0);
  shape[0] = micro_batch.num_samples;
  Tensor part(batch.dtype(), shape);
  std::memcpy(
      part.raw(), batch.raw() + micro_batch.first_sample * row, static_cast<size_t>(part.bytes()));
  return part;
}

// Of all micro-batches of a rank, in the order of `names`.
std::vector<std::vector<Tensor>> inputs_of(const std::map<std::string, Tensor>& batch,
                                           const std::vector<std::string>& names,
                                           const Program& program) {
  std::vector<std::vector<Tensor>> inputs;
  for (const MicroBatch& micro_batch : program.micro_batches) {
    inputs.emplace_back();
    for (const std::string& name : names) {
      inputs.back().push_back(samples_of(batch.at(name), micro_batch));
    }
  }
  return inputs;
}

struct Groups {
  std::unique_ptr<Communicator> data, tensor, pipeline;
  RankCommunicators view;

  Groups(const Plan& plan, Communicator& world) {
    const RankCoordinates at = rank_coordinates(plan, world.rank());
    data = world.split(at.stage * plan.tensor_parallel + at.tensor_rank, at.data_rank);
    tensor = world.split(at.stage * plan.data_parallel + at.data_rank, at.tensor_rank);
    pipeline = world.split(at.data_rank * plan.tensor_parallel + at.tensor_rank, at.stage);
    view.world = plan.world_size() > 1 ? &world : nullptr;
    view.data = plan.data_parallel > 1 ? data.get() : nullptr;
    view.tensor = plan.tensor_parallel > 1 ? tensor.get() : nullptr;
    view.pipeline = plan.pipeline_parallel > 1 ? pipeline.get() : nullptr;
  }
};

// Collects whole tensors from the ranks' pieces, and checks that copies agree.
void collect(const Program& program, const Executor& executor, PlanRun& run) {
  for (const Value* value : executor.persistent_values()) {
    if (value->kind == ValueKind::kGradient) {
      continue;
    }
    const Tensor local = executor.read(value->name);
    const auto piece = program.pieces.find(value->name);
    if (piece != program.pieces.end()) {
      Tensor& whole = run.persistent[value->name];
      if (!whole.defined()) {
        whole = Tensor(local.dtype(), piece->second.whole_shape);
      }
      place_piece(whole, piece->second, local);
      continue;
    }
    const auto [at, is_new] = run.persistent.emplace(value->name, local);
    EXPECT_TRUE(is_new || identical(at->second, local))
        << "copies of '" << value->name << "' differ on rank " << program.rank;
  }
}

}  // namespace

PlanRun run_plan(const TrainingGraphFactory& factory,
                 const Plan& plan,
                 const BatchFeeds& feeds,
                 const RunOptions& options) {
  DeviceOptions device_options;
  device_options.reference_kernels = options.reference_kernels;
  PlanRun run;
  run.programs = partition(factory,
                           plan,
                           std::vector<DeviceSpec>(static_cast<size_t>(plan.world_size()),
                                                   cpu_device_spec(device_options)));
  run.arena_bytes.resize(run.programs.size());
  const TrainingGraph whole = factory(1, true);
  std::vector<std::string> input_names;
  for (const ValueId id : whole.graph.values_of_kind(ValueKind::kInput)) {
    if (whole.graph.value(id).name.rfind("trainrt.", 0) != 0) {
      input_names.push_back(whole.graph.value(id).name);
    }
  }
  std::vector<std::unique_ptr<Communicator>> worlds =
      make_thread_communicators(plan.world_size(), std::chrono::seconds(30));
  std::mutex mutex;
  std::string failure;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < worlds.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const Program& program = run.programs[rank];
        Groups groups(plan, *worlds[rank]);
        // No device has a byte more than the plan asks for.
        const MemoryPlan memory = plan_memory(program);
        DeviceOptions own_options = device_options;
        own_options.memory_limit = memory.arena_bytes;
        const std::unique_ptr<Device> device = make_cpu_device(static_cast<int>(rank), own_options);
        device->attach_thread();
        Executor executor(*device, groups.view, input_names);
        const int index = executor.add_program(std::make_shared<Program>(program), memory);
        executor.load();
        run.arena_bytes[rank] = executor.arena_bytes();
        EXPECT_EQ(executor.arena_bytes(), memory.arena_bytes);
        EXPECT_EQ(memory.breakdown.total(), memory.arena_bytes);
        for (const Value* value : executor.persistent_values()) {
          executor.write(value->name, initial_value(*value));
        }
        std::vector<std::vector<std::vector<Tensor>>> inputs;
        std::vector<StepFeed> steps(static_cast<size_t>(options.steps));
        for (int step = 0; step < options.steps; ++step) {
          inputs.push_back(inputs_of(feeds(step), input_names, program));
        }
        for (int step = 0; step < options.steps; ++step) {
          StepFeed& feed = steps[static_cast<size_t>(step)];
          feed.seed = 7;
          feed.step = step;
          feed.update = step;
          feed.learning_rate = options.learning_rate;
          feed.loss_scale = options.loss_scale ? options.loss_scale(step) : 1;
          feed.skip_overflow = plan.precision == "fp16";
          feed.inputs = &inputs[static_cast<size_t>(step)];
          const bool drains = !program.runs_on() || step + 1 == options.steps ||
                              (options.drains_after && options.drains_after(step));
          feed.next = drains ? nullptr : &steps[static_cast<size_t>(step) + 1];
        }
        for (const StepFeed& feed : steps) {
          const StepResult result = executor.run_step(index, feed);
          if (rank == 0) {
            run.losses.push_back(result.loss());
            run.grad_norms.push_back(result.grad_norm);
          }
        }
        const std::lock_guard lock(mutex);
        collect(program, executor, run);
      } catch (const std::exception& error) {
        worlds[rank]->abort(error.what());
        const std::lock_guard lock(mutex);
        failure += concat("rank ", rank, ": ", error.what(), "\n");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  TRAINRT_REQUIRE(failure.empty(), kInternal, failure);
  return run;
}

void expect_equal_bits(const PlanRun& a, const PlanRun& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.grad_norms, b.grad_norms) << what;
  EXPECT_EQ(a.persistent.size(), b.persistent.size()) << what;
  for (const auto& [name, tensor] : a.persistent) {
    const auto other = b.persistent.find(name);
    EXPECT_TRUE(other != b.persistent.end() && identical(tensor, other->second))
        << name << " under " << what;
  }
}

namespace {

double norm(const Tensor& tensor) {
  const Tensor wide = tensor.cast(DType::kFloat64);
  double sum = 0;
  for (int64_t i = 0; i < wide.num_elements(); ++i) {
    sum += wide.data<double>()[i] * wide.data<double>()[i];
  }
  return std::sqrt(sum);
}

double distance(const Tensor& a, const Tensor& b) {
  Tensor difference = a.cast(DType::kFloat64);
  const Tensor other = b.cast(DType::kFloat64);
  for (int64_t i = 0; i < difference.num_elements(); ++i) {
    difference.data<double>()[i] -= other.data<double>()[i];
  }
  return norm(difference);
}

}  // namespace

void expect_close(const PlanRun& a, const PlanRun& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (size_t i = 0; i < a.losses.size(); ++i) {
    EXPECT_NEAR(a.losses[i], b.losses[i], tolerance * std::abs(a.losses[i])) << what;
    // A gradient that is zero has the rounding of terms as large as the loss instead.
    const double rounding = 1e-4 * tolerance * std::abs(a.losses[i]);
    EXPECT_NEAR(a.grad_norms[i], b.grad_norms[i], 10 * tolerance * a.grad_norms[i] + rounding)
        << what;
  }
  double total = 0;
  for (const auto& [name, tensor] : a.persistent) {
    total += norm(tensor);
  }
  const double floor = total / static_cast<double>(std::max<size_t>(1, a.persistent.size()));
  EXPECT_EQ(a.persistent.size(), b.persistent.size()) << what;
  for (const auto& [name, tensor] : a.persistent) {
    const auto other = b.persistent.find(name);
    ASSERT_TRUE(other != b.persistent.end()) << name << " is missing under " << what;
    ASSERT_EQ(tensor.shape(), other->second.shape()) << name << " under " << what;
    EXPECT_LE(distance(tensor, other->second), 10 * tolerance * std::max(floor, norm(tensor)))
        << name << " under " << what;
  }
}

}  // namespace trainrt::testing
