// Several GPUs at once: every way to split a model over them gives the losses of one CPU, in every
// order that their streams may run in, and a failure on any of them ends all of them.
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <thread>

#include "parallel/communicator_memory.h"
#include "runtime/rank_devices.h"
#include "runtime/trainer.h"
#include "tests/cuda/cuda_training_run.h"

namespace trainrt::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

using Words = std::vector<std::string>;

const Words kFourLayers = {
    "--layers", "4", "--hidden", "16", "--heads", "2", "--vocab", "40", "--seq", "8"};

const Words kShortStep = {"--steps", "1", "--batch-size", "2", "--micro-batch-size", "1"};

class CudaRanksRun : public CudaTrainingTest {
 protected:
  void SetUp() override {
    CudaTrainingTest::SetUp();
    cuda_double::reset({.num_devices = 4});
  }

  // Flags for a run on this many GPUs.
  Words gpus(int count, const Words& pins) {
    const std::string cluster = folder_.file("cluster.yaml");
    write_text(cluster,
               concat("hosts: [{count: 1, devices: [{count: ",
                      count,
                      ", type: my-card}], intra: nvlink3}]\n"
                      "devices: {my-card: {memory: 8GiB, flops: {fp32: 1e13, fp64: 1e13, bf16: "
                      "1e14}, memory_bandwidth: 1e12}}\n"));
    std::string devices = "cuda:0";
    for (int i = 1; i < count; ++i) {
      devices += concat(",", i);
    }
    Words flags = {"--devices", devices, "--cluster", cluster};
    flags.insert(flags.end(), pins.begin(), pins.end());
    return flags;
  }
};

struct Split {
  std::string name;
  int num_gpus = 2;
  Words pins;
  std::string family = "gpt2";
  Words sizes = kFourLayers;
  std::string precision = "fp32";
};

class CudaRanksTest : public CudaRanksRun, public ::testing::WithParamInterface<Split> {};

TEST_P(CudaRanksTest, TrainAsOneCpu) {
  const Split& split = GetParam();
  const std::string path = model(split.family, split.sizes);
  const Words steps = {"--steps",
                       "2",
                       "--batch-size",
                       "4",
                       "--micro-batch-size",
                       "1",
                       "--precision",
                       split.precision};
  const Course expected = train(path, kCpu, steps);
  ASSERT_EQ(expected.losses.size(), 2u);
  cuda_double::reset({.num_devices = 4});
  expect_near(train(path, gpus(split.num_gpus, split.pins), steps), expected, 1e-5);
  const std::vector<int64_t> arenas = last_step().at("peak_bytes");
  ASSERT_EQ(arenas.size(), static_cast<size_t>(split.num_gpus));
  for (int device = 0; device < split.num_gpus; ++device) {
    EXPECT_LE(cuda_double::most_bytes_in_use(device),
              arenas[static_cast<size_t>(device)] + kBytesBesideArena)
        << "cuda:" << device;
  }
}

const Words kT5 = {
    "--layers", "2", "--hidden", "16", "--heads", "2", "--vocab", "40", "--seq", "8"};

// Its skips pass stages by: several tensors go each way between two ranks.
const Words kUnet = {"--layers", "2", "--hidden", "8", "--image", "8"};

INSTANTIATE_TEST_SUITE_P(
    Splits,
    CudaRanksTest,
    ::testing::Values(
        Split{"data", 2, {"--dp", "2"}},
        Split{"data_uneven", 3, {"--dp", "3", "--shares", "1,1,2"}},
        Split{"zero1", 2, {"--dp", "2", "--zero", "1"}},
        Split{"zero2", 2, {"--dp", "2", "--zero", "2"}},
        Split{"zero3", 2, {"--dp", "2", "--zero", "3"}},
        Split{"offload", 1, {"--offload", "optimizer"}},
        Split{"zero1_offload", 2, {"--dp", "2", "--zero", "1", "--offload", "optimizer"}},
        Split{"tensor", 2, {"--tp", "2"}},
        Split{"sequence", 2, {"--tp", "2", "--sequence-parallel"}},
        Split{"gpipe", 2, {"--pp", "2", "--schedule", "gpipe"}},
        Split{"one_f_one_b", 2, {"--pp", "2", "--schedule", "1f1b"}},
        Split{"four_stages", 4, {"--pp", "4", "--schedule", "1f1b"}},
        Split{"zero_bubble", 2, {"--pp", "2", "--schedule", "zb-h1"}},
        Split{"zero_bubble_of_four", 4, {"--pp", "4", "--schedule", "zb-h1"}},
        Split{"interleaved", 2, {"--pp", "2", "--virtual-stages", "2"}},
        Split{"recompute", 2, {"--pp", "2", "--recompute", "full"}},
        Split{"pipeline_and_data", 4, {"--pp", "2", "--dp", "2", "--zero", "1"}},
        Split{"pipeline_and_tensor", 4, {"--pp", "2", "--tp", "2"}},
        Split{"interleaved_and_data", 4, {"--pp", "2", "--virtual-stages", "2", "--dp", "2"}},
        Split{"t5_stages", 2, {"--pp", "2", "--virtual-stages", "1"}, "t5", kT5},
        Split{"t5_interleaved", 2, {"--pp", "2", "--virtual-stages", "2"}, "t5", kT5},
        Split{"t5_of_four", 4, {"--pp", "4", "--schedule", "1f1b"}, "t5", kT5},
        Split{"skips", 2, {"--pp", "2", "--schedule", "1f1b"}, "unet", kUnet, "fp64"},
        Split{"skips_gpipe", 2, {"--pp", "2", "--schedule", "gpipe"}, "unet", kUnet, "fp64"},
        Split{"skips_of_three", 3, {"--pp", "3", "--schedule", "1f1b"}, "unet", kUnet, "fp64"},
        Split{"skips_of_four", 4, {"--pp", "4", "--schedule", "zb-h1"}, "unet", kUnet, "fp64"},
        Split{
            "skips_interleaved", 2, {"--pp", "2", "--virtual-stages", "2"}, "unet", kUnet, "fp64"},
        Split{"skips_and_data", 4, {"--pp", "2", "--dp", "2"}, "unet", kUnet, "fp64"}),
    [](const auto& split) { return split.param.name; });

// Scores of a vocabulary that is split stay in 16 bits: their maxima are compared so, their sums
// are added in float32.
TEST_F(CudaRanksRun, LossesOfSplitScoresInBfloat16AreThoseOfOneCpu) {
  const std::string path = model("gpt2", kTinyGpt);
  const Words steps = {"--steps", "2", "--batch-size", "4", "--precision", "bf16"};
  const Course expected = train(path, kCpu, steps);
  cuda_double::reset({.num_devices = 2});
  expect_near(train(path, gpus(2, {"--tp", "2"}), steps), expected, 2e-3);
}

// Runs `arguments` as each of several processes would, but for being threads: each joins the others
// and drives a GPU of its own. What each threw.
std::vector<std::string> run_processes(int count, const Words& arguments) {
  const Options options = options_of(arguments);
  Socket listener = Socket::listening(0);
  RankPlace place;
  place.world_size = count;
  place.port = listener.local_port();
  std::vector<std::string> errors(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    place.rank = rank;
    place.listening_fd = rank == 0 ? ::dup(listener.fd()) : -1;
    threads.emplace_back([&errors, own = Options(options), place]() mutable {
      if (place.rank > 0) {
        own.metrics.clear();
      }
      Ranks ranks(place, own.deadline);
      try {
        train_ranks(own, ranks);
        ranks.leave();
      } catch (const Error& error) {
        errors[static_cast<size_t>(place.rank)] = error.what();
        ranks.leave_failed(error.code(), error.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

TEST_F(CudaRanksRun, ProcessesWithAGpuEachTrainAsOneCpu) {
  const std::string path = model("gpt2", kFourLayers);
  const Words steps = {"--steps", "2", "--batch-size", "8", "--micro-batch-size", "1"};
  const Course expected = train(path, kCpu, steps);
  for (const Words& pins : {Words{"--dp", "2", "--zero", "1"}, {"--pp", "2"}}) {
    SCOPED_TRACE(pins[0]);
    Words devices = gpus(2, pins);
    devices[1] = "cuda";
    EXPECT_THAT(run_processes(2, run_arguments(path, devices, steps)), Each(std::string()));
    expect_near(course(), expected, 1e-5);
  }
}

TEST_F(CudaRanksRun, EachOfSeveralGpusHasAProcess) {
  const std::string path = model("mlp", {"--hidden", "8"});
  std::map<std::string, std::string> variables;
  const Environment environment = [&](const std::string& name) {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional(at->second);
  };
  const auto options = [&](const std::string& devices, int cluster) {
    Words flags = gpus(cluster, {});
    flags[1] = devices;
    Options parsed = options_of(run_arguments(path, flags, kShortStep));
    parsed.gpus_in_threads = false;
    return parsed;
  };
  const auto num_started = [&](const std::string& devices, int cluster) {
    const auto launch = choose_launch(options(devices, cluster), environment);
    EXPECT_TRUE(!launch || launch->place.world_size == launch->num_local);
    return launch ? launch->num_local : 0;
  };
  EXPECT_EQ(num_started("cuda:2,3", 2), 2);
  EXPECT_EQ(num_started("cuda", 4), 4);
  EXPECT_EQ(num_started("cuda", 2), 2);
  EXPECT_EQ(num_started("cuda", 1), 0);
  EXPECT_EQ(num_started("cuda:1", 1), 0);
  EXPECT_EQ(num_started("cpu:2", 2), 0);
  try {
    num_started("cuda:1,2", 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("is for 3 devices, and --devices cuda:1,2 are 2 GPUs"));
  }
  // Each of them drives a GPU that was named, in their order.
  const std::vector<DeviceOptions> devices =
      run_devices(options("cuda:3,1", 2), {{"host", "host"}, 1});
  EXPECT_EQ(devices.at(0).cuda_index, 3);
  EXPECT_EQ(devices.at(1).cuda_index, 1);
  // Those that something else has started, one by one or not, start nothing.
  variables = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}};
  const auto given = choose_launch(options("cuda:1,2", 2), environment);
  ASSERT_TRUE(given);
  EXPECT_EQ(given->num_local, 1);
  EXPECT_EQ(given->place.rank, 1);
}

// A little beside the arena is not enough.
TEST_F(CudaRanksRun, RoomForCommunicatorsIsAskedForBeforeTheyTakeIt) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(2, {"--dp", "2"});
  const size_t wanted = static_cast<size_t>(communicator_bytes(2, 1, 1));
  ASSERT_GT(wanted, size_t{1} << 28);
  const auto message_of = [&](size_t memory_bytes, size_t taken) -> std::string {
    cuda_double::reset(
        {.num_devices = 4, .memory_bytes = memory_bytes, .communicator_bytes = taken});
    try {
      train(path, devices, kShortStep);
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.code()), 5);
      return error.what();
    }
    return "";
  };
  constexpr size_t kArena = size_t{1} << 24;  // more than it has
  EXPECT_EQ(message_of(wanted + kArena, wanted), "");
  const std::string refused = message_of(wanted, wanted);
  EXPECT_THAT(refused, HasSubstr(concat("and NCCL about ", wanted, " beside them, ")));
  EXPECT_THAT(refused, HasSubstr(" are free, short by "));
  // NCCL takes more than was thought.
  const std::string failed = message_of(wanted + kArena, wanted + kArena);
  EXPECT_THAT(failed, HasSubstr(concat("Failed to CUDA calloc ", wanted + kArena, " bytes")));
  EXPECT_THAT(failed, HasSubstr(concat("of the GPU's ", wanted + kArena, " bytes are free")));
}

TEST_F(CudaRanksRun, DeterministicSumsAreNotLeftToTheSwitches) {
  constexpr const char* kVariable = "NCCL_NVLS_ENABLE";
  ::unsetenv(kVariable);
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(2, {"--dp", "2"});
  train(path, devices, kShortStep);
  EXPECT_EQ(std::getenv(kVariable), nullptr);
  Words steps = kShortStep;
  steps.push_back("--deterministic");
  train(path, devices, steps);
  EXPECT_STREQ(std::getenv(kVariable), "0");
  ::setenv(kVariable, "1", 1);
  train(path, devices, steps);
  EXPECT_STREQ(std::getenv(kVariable), "0");
  ::unsetenv(kVariable);
}

// GPUs of the catalogue need no cluster file.
TEST_F(CudaRanksRun, KnownGpusArePlannedFor) {
  const std::string path = model("gpt2", kFourLayers);
  const Words steps = {"--steps", "2", "--batch-size", "8", "--pp", "2"};
  const Course expected = train(path, kCpu, {"--steps", "2", "--batch-size", "8"});
  EXPECT_THROW(train(path, {"--devices", "cuda:0,1"}, steps), Error);
  cuda_double::reset({.device_name = "NVIDIA H100 80GB HBM3"});
  expect_near(train(path, {"--devices", "cuda:0,1"}, steps), expected, 1e-5);
}

TEST_F(CudaRanksRun, ProcessesThatWouldShareAGpuAreRefused) {
  cuda_double::reset({.num_devices = 1});
  const std::string path = model("mlp", {"--hidden", "8"});
  Words devices = gpus(2, {"--dp", "2"});
  devices[1] = "cuda";
  EXPECT_THAT(run_processes(2, run_arguments(path, devices, kShortStep)),
              Each(HasSubstr("ranks 0 and 1 have the same GPU")));
}

// Steps that go over into each other, in every order of streams.
TEST_F(CudaRanksRun, TwoVersionPipelinesTrainAsOneCpu) {
  const Words two_versions = {"--schedule", "2bw"};
  const Words steps = {"--steps", "5", "--batch-size", "8", "--micro-batch-size", "1"};
  const auto with_rule = [&](Words words) {
    words.insert(words.end(), two_versions.begin(), two_versions.end());
    return words;
  };
  const std::string path = model("gpt2", kFourLayers);
  const Course expected = train(path, with_rule(kCpu), steps);
  for (const Words& pins : {Words{"--pp", "2"}, {"--pp", "4"}, {"--pp", "2", "--dp", "2"}}) {
    SCOPED_TRACE(pins[1]);
    expect_near(train(path, with_rule(gpus(pins.size() > 2 ? 4 : std::stoi(pins[1]), pins)), steps),
                expected,
                1e-5);
  }
  const Words devices = with_rule(gpus(2, {"--pp", "2"}));
  const std::string tiny = model("gpt2", kTinyGpt);
  const Words short_steps = {"--steps", "3", "--batch-size", "3", "--micro-batch-size", "1"};
  expect_equal_in_orders([&] { return train(tiny, devices, short_steps); }, 5);
  // Its forwards pass stages by.
  const std::string skips = model("unet", kUnet);
  Words exact = steps;
  exact.insert(exact.end(), {"--precision", "fp64"});
  const Course of_skips = train(skips, with_rule(kCpu), exact);
  expect_near(train(skips, with_rule(gpus(4, {"--pp", "4"})), exact), of_skips, 1e-5);
}

TEST_F(CudaRanksRun, EveryOrderOfStreamsGivesEqualBits) {
  const std::string path = model("gpt2", kTinyGpt);
  const Words steps = {"--steps", "1", "--batch-size", "4"};
  const Words devices = gpus(2, {"--pp", "2"});
  expect_equal_in_orders([&] { return train(path, devices, steps); }, 10);
}

// Makes each of these waits missing in several orders: how many were noticed, by a wrong loss or an
// error.
TEST_F(CudaRanksRun, AMissingWaitIsNoticed) {
  const std::string path = model("gpt2", kTinyGpt);
  const Words steps = {"--steps", "1", "--batch-size", "4"};
  const Words devices = gpus(2, {"--tp", "2"});
  const Course right = train(path, devices, steps);
  const int64_t waits = cuda_double::num_waits();
  ASSERT_GT(waits, 4);
  int noticed = 0, tried = 0;
  for (int64_t wait = 1; wait <= waits; wait += std::max<int64_t>(1, waits / 5)) {
    bool differs = false;
    for (uint64_t seed = 0; seed < 6 && !differs; ++seed) {
      cuda_double::reset({.num_devices = 4, .seed = seed, .drop_wait = wait});
      try {
        const Course course = train(path, devices, steps);
        differs = course.losses != right.losses || course.norms != right.norms;
      } catch (const Error&) {
        differs = true;
      }
    }
    noticed += differs;
    ++tried;
  }
  EXPECT_GT(noticed, tried / 2) << "of " << tried << " waits left out";
}

// A GPU that loads a kernel's code, or a graph of kernels, waits for its messages to be taken, by a
// peer that may do so too.
TEST_F(CudaRanksRun, NoKernelOrGraphIsLoadedWhileRanksCommunicate) {
  const std::string path = model("gpt2", kFourLayers);
  const Words steps = {"--steps", "2", "--batch-size", "5", "--micro-batch-size", "2"};
  for (const Words& pins : {Words{"--pp", "2"},
                            {"--pp", "2", "--virtual-stages", "2"},
                            {"--pp", "2", "--schedule", "zb-h1"},
                            {"--pp", "2", "--schedule", "2bw"},
                            {"--dp", "2"},
                            {"--tp", "2"}}) {
    SCOPED_TRACE(pins[0] + " " + pins.back());
    cuda_double::reset({.num_devices = 4});
    train(path, gpus(2, pins), steps);
    EXPECT_EQ(cuda_double::num_loads_under_communication(), 0);
    EXPECT_GT(cuda_double::num_replays(), 0);
  }
}

// A trace waits for what a rank computes and receives, not for its peers to take what it sends.
TEST_F(CudaRanksRun, TracedPipelinesTrainAsOthers) {
  const std::string path = model("gpt2", kFourLayers);
  const Words steps = {"--steps", "2", "--batch-size", "4", "--micro-batch-size", "1"};
  for (const Words& pins : {Words{"--pp", "2", "--schedule", "1f1b"},
                            {"--pp", "4", "--schedule", "1f1b"},
                            {"--pp", "2", "--virtual-stages", "2"}}) {
    SCOPED_TRACE(pins[1] + " " + pins.back());
    const Words devices = gpus(std::stoi(pins[1]), pins);
    const Course expected = train(path, devices, steps);
    Words traced = steps;
    traced.insert(traced.end(), {"--trace", folder_.file("trace.json"), "--deadline", "20"});
    EXPECT_EQ(train(path, devices, traced).losses, expected.losses);
  }
}

// The rank that notices tells what is wrong; it does not say that communication failed.
TEST_F(CudaRanksRun, ALossThatIsNotFiniteIsNamedOnEveryNumberOfGpus) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words steps = {
      "--steps", "4", "--batch-size", "4", "--micro-batch-size", "1", "--lr", "1e30"};
  for (const Words& pins : {Words{"--dp", "1"}, {"--dp", "2"}, {"--tp", "2"}, {"--pp", "2"}}) {
    SCOPED_TRACE(pins[0] + " " + pins[1]);
    try {
      train(path, gpus(std::stoi(pins[1]), pins), steps);
      ADD_FAILURE() << "nothing was noticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNonFinite) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("weight"));
    }
  }
}

TEST_F(CudaRanksRun, AFailureOnOneGpuEndsAllWithoutALeak) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(2, {"--pp", "2"});
  expect_clean_failures([&] { train(path, devices, kShortStep); }, 5, 67);
}

TEST_F(CudaRanksRun, AFailureOnOneOfFourGpusEndsAllWithoutALeak) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(4, {"--dp", "2", "--tp", "2"});
  expect_clean_failures([&] { train(path, devices, kShortStep); }, 7, 211);
}

class LongCudaRanksTest : public CudaRanksRun {};

TEST_F(LongCudaRanksTest, EveryCallsFailureInAPipelineEndsAllWithoutALeak) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(2, {"--pp", "2"});
  expect_clean_failures([&] { train(path, devices, kShortStep); }, 1, 1);
}

TEST_F(LongCudaRanksTest, EveryCallsFailureBetweenShardsEndsAllWithoutALeak) {
  const std::string path = model("mlp", {"--hidden", "8"});
  for (const Words& pins : {Words{"--dp", "2", "--zero", "2"}, {"--tp", "2"}}) {
    SCOPED_TRACE(pins[0]);
    const Words devices = gpus(2, pins);
    expect_clean_failures([&] { train(path, devices, kShortStep); }, 1, 1);
  }
}

TEST_F(LongCudaRanksTest, EveryCallsFailureOnFourGpusEndsAllWithoutALeak) {
  const std::string path = model("mlp", {"--hidden", "8"});
  const Words devices = gpus(4, {"--dp", "2", "--tp", "2"});
  expect_clean_failures([&] { train(path, devices, kShortStep); }, 1, 1);
}

TEST_F(LongCudaRanksTest, FailuresOnOneOfFourGpusEndAllWithoutALeak) {
  const std::string path = model("gpt2", kFourLayers);
  const Words devices = gpus(4, {"--pp", "2", "--dp", "2"});
  const Words steps = {"--steps", "1", "--batch-size", "4", "--micro-batch-size", "1"};
  expect_clean_failures([&] { train(path, devices, steps); }, 1, 101);
}

TEST_F(LongCudaRanksTest, UnetTrainsInStagesAsOnOneCpu) {
  const std::string path = model("unet", {"--image", "16", "--hidden", "8"});
  const Words steps = {
      "--steps", "2", "--batch-size", "4", "--micro-batch-size", "1", "--precision", "fp64"};
  const Course expected = train(path, kCpu, steps);
  const Words devices = gpus(2, {"--pp", "2", "--virtual-stages", "1"});
  expect_near(train(path, devices, steps), expected, 1e-5);
}

TEST_F(LongCudaRanksTest, AThousandOrdersOfStreamsGiveEqualBits) {
  const std::string path = model("gpt2", kTinyGpt);
  const Words steps = {"--steps", "2", "--batch-size", "4"};
  for (const Words& pins : {Words{"--dp", "2"}, {"--tp", "2"}, {"--pp", "2"}}) {
    SCOPED_TRACE(pins[0]);
    const Words devices = gpus(2, pins);
    expect_equal_in_orders([&] { return train(path, devices, steps); }, 340);
  }
}

}  // namespace
}  // namespace trainrt::testing
