// Damaged checkpoints are passed over: no damage crashes, and none becomes other values.
#include "runtime/checkpoint.h"

#include <gmock/gmock.h>
#include <zlib.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "graph/base/log.h"
#include "parallel/thread_communicator.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using testing::file_text;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::write_text;
using Json = nlohmann::ordered_json;

const Shape kWide = {4, 3};

TrainingPosition position_at(int64_t step) {
  TrainingPosition position;
  position.step = step;
  position.position = 32 * step;
  position.seed = 5;
  position.loss_scale = 65536;
  position.model_hash = "c0ffee";
  position.settings = {{"lr", "0.001"}, {"optimizer", "adamw"}};
  return position;
}

// The numbers from `first` on.
Tensor counting(const Shape& shape, int64_t first) {
  Tensor tensor(DType::kFloat32, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.data<float>()[i] = static_cast<float>(first + i);
  }
  return tensor;
}

// Two ranks hold half of the rows of "wide" each; rank 0 "bias" and "steps", a scalar, besides.
void write_two_ranks(const std::string& folder, int64_t step) {
  const auto communicators = make_thread_communicators(2, std::chrono::seconds(60));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto fetch = [&](const std::string& name) -> CheckpointTensor {
        if (name == "wide") {
          return {name, kWide, {2 * rank, 0}, counting({2, 3}, 100 * step + 6 * rank)};
        }
        const Shape shape = name == "bias" ? Shape{3} : Shape{};
        return {name, shape, Shape(shape.size(), 0), counting(shape, 1000 * step)};
      };
      write_checkpoint(folder,
                       position_at(step),
                       rank == 0 ? std::vector<std::string>{"wide", "bias", "steps"}
                                 : std::vector<std::string>{"wide"},
                       fetch,
                       communicators[static_cast<size_t>(rank)].get());
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
}

// Whether all of it is as write_two_ranks() was given it.
bool is_as_written(const Checkpoint& checkpoint, int64_t step) {
  const TrainingPosition &found = checkpoint.position(), wanted = position_at(step);
  return found.step == wanted.step && found.skipped == wanted.skipped &&
         found.position == wanted.position && found.seed == wanted.seed &&
         found.loss_scale == wanted.loss_scale && found.finite_steps == wanted.finite_steps &&
         found.model_hash == wanted.model_hash && found.settings == wanted.settings &&
         checkpoint.names() == std::vector<std::string>{"bias", "steps", "wide"} &&
         identical(checkpoint.read("wide"), counting(kWide, 100 * step)) &&
         identical(checkpoint.read("bias"), counting({3}, 1000 * step)) &&
         identical(checkpoint.read("steps"), counting({}, 1000 * step));
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    write_two_ranks(folder_.path(), 2);
    write_two_ranks(folder_.path(), 3);
    set_log_level(LogLevel::kError);  // thousands of warnings
  }
  ~CheckpointTest() override { set_log_level(LogLevel::kInfo); }

  Json manifest() const { return Json::parse(file_text(manifest_)); }

  // Writes it with the check sum that it is to have.
  void seal(Json edited) const {
    edited.erase("crc32");
    const std::string text = edited.dump();
    edited["crc32"] = ::crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size());
    write_text(manifest_, edited.dump());
  }

  // The step of the checkpoint that a resumed run begins from, if all in it is right, else -1.
  int64_t resumed_step() const {
    const std::optional<Checkpoint> newest = Checkpoint::newest(folder_.path());
    const int64_t step = newest ? newest->position().step : -1;
    return step >= 0 && is_as_written(*newest, step) ? step : -1;
  }

  void expect_no_flip_matters(int bits_of_a_byte) const {
    const std::string whole = file_text(manifest_);
    std::mt19937 random(3);
    int passed_over = 0;
    for (size_t at = 0; at < whole.size(); ++at) {
      const auto first = static_cast<int>(random() % 8);
      for (int i = 0; i < bits_of_a_byte; ++i) {
        std::string damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << (first + i) % 8));
        write_text(manifest_, damaged);
        const int64_t step = resumed_step();
        ASSERT_TRUE(step == 2 || step == 3) << "bit " << (first + i) % 8 << " of byte " << at;
        passed_over += step == 2 ? 1 : 0;
      }
    }
    EXPECT_GT(passed_over, 0);
  }

  testing::TemporaryFolder folder_;
  std::string newest_ = folder_.file("step-00000003");
  std::string manifest_ = newest_ + "/manifest.json";
};

using LongCheckpointTest = CheckpointTest;

TEST_F(CheckpointTest, IsReadAsItWasWritten) {
  EXPECT_EQ(resumed_step(), 3);
  EXPECT_EQ(manifest()["format"], 2);
}

TEST_F(CheckpointTest, ASettingNeedNotBeUtf8) {
  TrainingPosition position = position_at(7);
  position.settings["data"] = "caf\xe9.npz";
  const auto fetch = [](const std::string& name) -> CheckpointTensor {
    return {name, {}, {}, counting({}, 1)};
  };
  write_checkpoint(folder_.path(), position, {"x"}, fetch, nullptr);
  EXPECT_EQ(Checkpoint::newest(folder_.path())->position().settings.at("data"),
            "caf\xef\xbf\xbd.npz");
}

TEST_F(CheckpointTest, AFlippedBitOfTheManifestNeverGivesOtherValues) {
  expect_no_flip_matters(1);
}

TEST_F(LongCheckpointTest, NoFlippedBitOfTheManifestGivesOtherValues) {
  expect_no_flip_matters(8);
}

TEST_F(CheckpointTest, ACutManifestIsPassedOver) {
  const std::string whole = file_text(manifest_);
  for (size_t bytes = 0; bytes + 2 < whole.size(); bytes += 37) {
    write_text(manifest_, whole.substr(0, bytes));
    ASSERT_EQ(resumed_step(), 2) << bytes;
  }
  fs::remove(manifest_);
  EXPECT_EQ(resumed_step(), 2);
}

TEST_F(CheckpointTest, WhatTheCheckSumCoversButDoesNotFitIsPassedOver) {
  const Json whole = manifest();
  ASSERT_EQ(whole["tensors"][0]["name"], "wide");
  ASSERT_EQ(whole["tensors"][1]["name"], "bias");
  ASSERT_EQ(whole["tensors"][2]["name"], "steps");
  ASSERT_EQ(whole["tensors"][3]["name"], "wide");
  constexpr int64_t kHuge = int64_t{1} << 62;
  const auto begin = whole["tensors"][0]["begin"].get<int64_t>();
  struct Damage {
    const char* at;
    Json value;
    const char* says;  // read_manifest; empty: the files tell
  };
  const std::vector<Damage> damages = {
      {"/tensors/0/offset", {-40000, 0}, "wanted 0 or more"},
      {"/tensors/0/offset", {1000000000, 0}, "does not lie in"},
      {"/tensors/0/offset", {3, 0}, "does not lie in"},
      {"/tensors/0/offset", {0, 1}, "does not lie in"},
      {"/tensors/0/offset", {kHuge, 0}, "does not lie in"},
      {"/tensors/0/offset", {0}, "does not lie in"},
      {"/tensors/0/offset", {0, 0, 0}, "does not lie in"},
      {"/tensors/0/offset", {0.5, 0}, "whole number"},
      {"/tensors/0/offset", {1e30, 0}, "whole number"},
      {"/tensors/0/offset", 0, "wanted a list"},
      {"/tensors/0/offset", nullptr, "wanted a list"},
      {"/tensors/0/offset", {1, 0}, "overlap"},
      {"/tensors/0/offset", {2, 0}, "overlap"},
      {"/tensors/2/offset", {0}, "does not lie in"},
      {"/tensors/0/piece", {1, 3}, "hold 9 elements of 'wide', wanted 12"},
      {"/tensors/0/piece", {2, 4}, "does not lie in"},
      {"/tensors/0/piece", {kHuge, kHuge}, "does not lie in"},
      {"/tensors/0/piece", {-1, 3}, "wanted 0 or more"},
      {"/tensors/0/shape", {5, 3}, "disagree"},
      {"/tensors/0/shape", {kHuge, kHuge}, "disagree"},
      {"/tensors/0/dtype", "float64", "disagree"},
      {"/tensors/0/dtype", "float33", "unknown"},
      {"/tensors/0/name", "w2", "hold 6 elements of 'w2', wanted 12"},
      {"/tensors/0/begin", begin + 4, ""},
      {"/tensors/0/begin", -4, "wanted 0 or more"},
      {"/tensors/0/begin", kHuge, "goes beyond"},
      {"/tensors/0/file", "tensors-00001-of-00002.safetensors", "goes beyond"},
      {"/tensors/0/file", "other", "which it does not list"},
      {"/tensors/1/name", "bios", ""},
      {"/tensors/1/dtype", "int32", ""},
      {"/tensors/1/dtype", "float64", "goes beyond"},
      {"/tensors/1/shape", {1 << 20}, "hold 3 elements"},
      {"/tensors/1/shape", {kHuge}, "more than 2^48 elements"},
      {"/files/0/name", "other", "does not list"},
      {"/files/0/bytes", 10, "goes beyond"},
      {"/files/0/crc32", 1, ""},
      {"/files/0/crc32", kHuge, "32-bit"},
      {"/files/1", whole["files"][0], "listed twice"},
      {"/step", 4, ""},
      {"/position", -1, "wanted 0 or more"},
      {"/loss_scale", 0, "loss_scale"},
      {"/settings", 3, "'settings' holds 3, wanted an object"},
      {"/settings", {{"lr", 3}}, "'settings' holds 3, wanted a string"},
      {"/tensors/0/name", 3, "'name' holds 3, wanted a string"},
      {"/tensors/0", 3, "'name' is missing in 3"},
      {"/files", 3, "'files' holds 3, wanted a list"},
      {"/model_hash", nullptr, "'model_hash' holds null, wanted a string"},
      {"/format", 3, "its format is 3, this build reads 1 to 2"},
      {"/tensors", Json::array({whole["tensors"][0], whole["tensors"][3]}), ""},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(concat(damage.at, " = ", damage.value.dump()));
    Json edited = whole;
    edited[Json::json_pointer(damage.at)] = damage.value;
    seal(edited);
    EXPECT_EQ(resumed_step(), 2);
    try {
      read_manifest(newest_);
      EXPECT_STREQ(damage.says, "");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_STRNE(damage.says, "");
      EXPECT_THAT(error.message(), HasSubstr(damage.says));
    }
  }
  seal(whole);
  EXPECT_EQ(resumed_step(), 3);
}

TEST_F(CheckpointTest, AManifestThatIsNestedDeepIsPassedOver) {
  write_text(manifest_, "{\"step\": " + std::string(100'000, '['));
  EXPECT_EQ(resumed_step(), 2);
}

TEST_F(CheckpointTest, AMissingOrCutFileOfTensorsIsPassedOver) {
  const std::string file = newest_ + "/tensors-00001-of-00002.safetensors";
  write_text(file, file_text(file).substr(0, 100));
  EXPECT_EQ(resumed_step(), 2);
  fs::remove(file);
  EXPECT_EQ(resumed_step(), 2);
}

TEST_F(CheckpointTest, TheFormatWithoutACheckSumIsStillRead) {
  Json old = manifest();
  old["format"] = 1;
  write_text(manifest_, old.dump());
  EXPECT_EQ(resumed_step(), 2);  // another format than was summed
  old.erase("crc32");
  write_text(manifest_, old.dump());
  EXPECT_EQ(resumed_step(), 3);
  old["format"] = 2;
  write_text(manifest_, old.dump());
  EXPECT_EQ(resumed_step(), 2);
}

TEST_F(CheckpointTest, WhereAllAreBrokenNothingIsResumed) {
  fs::remove(manifest_);
  fs::remove(folder_.file("step-00000002/manifest.json"));
  try {
    Checkpoint::newest(folder_.path());
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.message(), HasSubstr("is whole (2 are broken)"));
  }
  const testing::TemporaryFolder empty;
  EXPECT_FALSE(Checkpoint::newest(empty.path()).has_value());
}

// The run that passed over step 5 goes on from step 3; what it saves is not outlived by step 5.
TEST_F(CheckpointTest, ABrokenLaterOneIsNotKeptInsteadOfTheSavedOne) {
  fs::create_directories(folder_.file("step-00000005"));
  remove_old_checkpoints(folder_.path(), 3, 1, "");
  EXPECT_THAT(checkpoint_steps(folder_.path()), ElementsAre(3, 5));
  EXPECT_EQ(resumed_step(), 3);
}

TEST(ResumeFromDamageTest, ARunPassesOverDamageAndNeedsOneWholeCheckpoint) {
  const testing::TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx"), checkpoints = folder.file("ck");
  write_text(model, testing::tiny_model());
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"run",
                                      model,
                                      "--loss",
                                      testing::kTinyLoss,
                                      "--checkpoint-dir",
                                      checkpoints,
                                      "--checkpoint-every",
                                      "2",
                                      "--resume"};
    words.insert(words.end(), more.begin(), more.end());
    return run_trainrt(words);
  };
  ASSERT_EQ(run({"--steps", "4"}).exit_code, 0);
  const ProgramResult wider = run({"--steps", "5", "--precision", "fp64"});
  EXPECT_EQ(wider.exit_code, 2) << wider.err;
  EXPECT_THAT(wider.err, HasSubstr("float32, --precision fp64 wants float64"));
  EXPECT_THAT(wider.err, HasSubstr("continue with --precision fp32, or start anew"));

  const auto damage = [&](const std::string& step) {
    const std::string file = checkpoints + "/step-" + step + "/manifest.json";
    std::string text = file_text(file);
    char& letter = text[text.find("model_hash") + 14];
    letter = static_cast<char>(letter ^ 1);
    write_text(file, text);
  };
  damage("00000004");
  const ProgramResult older = run({"--steps", "4"});
  EXPECT_EQ(older.exit_code, 0) << older.err;
  EXPECT_THAT(older.err, HasSubstr("step-00000004' is passed over: its manifest is damaged"));
  EXPECT_THAT(older.err, HasSubstr("resuming from " + checkpoints + "/step-00000002"));

  damage("00000002");
  damage("00000004");
  const ProgramResult none = run({"--steps", "6"});
  EXPECT_EQ(none.exit_code, 5) << none.err;
  EXPECT_THAT(none.err, HasSubstr("no checkpoint in '" + checkpoints + "' is whole"));
}

}  // namespace
}  // namespace trainrt
