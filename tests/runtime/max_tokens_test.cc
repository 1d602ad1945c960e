// --max-tokens: what runs together changes, what is learned does not.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "tests/support/run_program.h"
#include "tests/support/sequence_model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;
using testing::file_text;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_model;
using testing::write_text;
using Words = std::vector<std::string>;

constexpr int kSamples = 50;

class MaxTokensTest : public ::testing::Test {
 protected:
  MaxTokensTest() {
    write_text(model_, testing::sequence_model());
    testing::write_sequences(data_, kSamples);
  }

  ProgramResult run(const Words& more) {
    Words words = {"run",
                   model_,
                   "--data",
                   data_,
                   "--bind",
                   "S=16",
                   "--threads",
                   "1",
                   "--batch-size",
                   "16",
                   "--lr",
                   "0.05"};
    words.insert(words.end(), more.begin(), more.end());
    return run_trainrt(words);
  }

  std::vector<nlohmann::json> metrics(Words more) {
    const std::string file = folder_.file("m.jsonl");
    more.insert(more.end(), {"--metrics", file});
    const ProgramResult result = run(more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return lines(file);
  }

  static std::vector<nlohmann::json> lines(const std::string& file) {
    std::vector<nlohmann::json> steps;
    std::istringstream stream(file_text(file));
    for (std::string line; std::getline(stream, line);) {
      steps.push_back(nlohmann::json::parse(line));
      steps.back().erase("step_seconds");
    }
    return steps;
  }

  // Loss and norm of each step agree to `bound`, relative.
  static void expect_same_course(const std::vector<nlohmann::json>& a,
                                 const std::vector<nlohmann::json>& b,
                                 double bound,
                                 const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i) {
      for (const char* key : {"loss", "grad_norm"}) {
        const double value = a[i][key].get<double>();
        EXPECT_NEAR(value, b[i][key].get<double>(), bound * std::abs(value))
            << what << ", " << key << " of step " << i + 1;
      }
      EXPECT_EQ(a[i]["samples"], b[i]["samples"]) << what;
    }
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("sequence.onnx");
  std::string data_ = folder_.file("sequences.npz");
};

TEST_F(MaxTokensTest, TheLossIsThatOfWholePaddedBatchesOnAnyNumberOfDataRanks) {
  const Words common = {"--precision", "fp64", "--epochs", "2", "--seed", "3"};
  const auto with = [&](Words more) {
    more.insert(more.end(), common.begin(), common.end());
    return metrics(more);
  };
  const auto padded = with({});
  ASSERT_EQ(padded.size(), 8u);  // 3 full batches and one of two samples, twice
  for (const Words& split : {Words{"--devices", "cpu:1"},
                             Words{"--devices", "cpu:2", "--dp", "2"},
                             Words{"--devices", "cpu:3", "--dp", "3"},
                             Words{"--devices", "cpu:3", "--dp", "3", "--zero", "3"},
                             Words{"--devices", "cpu:4", "--dp", "2", "--pp", "2"},
                             Words{"--devices", "cpu:3", "--dp", "3", "--shares", "1,1e-3,2"}}) {
    Words words = split;
    words.insert(words.end(), {"--max-tokens", "48"});
    const auto cut = with(words);
    const std::string what = std::accumulate(split.begin(), split.end(), std::string());
    expect_same_course(padded, cut, 1e-10, what);
    EXPECT_EQ(cut.back()["position"], 2 * kSamples) << what;
  }
}

TEST_F(MaxTokensTest, InFloat32TheLossStaysWithinTheContractsBound) {
  const Words common = {"--epochs", "2"};
  const auto padded = metrics(common);
  for (const char* ranks : {"1", "2", "3"}) {
    const auto cut = metrics({"--epochs",
                              "2",
                              "--devices",
                              std::string("cpu:") + ranks,
                              "--dp",
                              ranks,
                              "--max-tokens",
                              "40"});
    ASSERT_EQ(padded.size(), cut.size());
    for (size_t i = 0; i < cut.size(); ++i) {
      const double loss = padded[i]["loss"].get<double>();
      EXPECT_NEAR(loss, cut[i]["loss"].get<double>(), 3e-6 * loss) << ranks << " ranks";
    }
  }
}

TEST_F(MaxTokensTest, PaddingIsCutAndRanksGetEquallyManyTokens) {
  const auto cut = metrics({"--devices", "cpu:3", "--dp", "3", "--max-tokens", "64"});
  int64_t tokens = 0, padded = 0, slowest = 0;
  for (const auto& step : cut) {
    const auto by_rank = step["padded_tokens"].get<std::vector<int64_t>>();
    ASSERT_EQ(by_rank.size(), 3u);
    tokens += step["tokens"].get<int64_t>();
    padded += std::accumulate(by_rank.begin(), by_rank.end(), int64_t{0});
    slowest += *std::max_element(by_rank.begin(), by_rank.end());
  }
  EXPECT_LT(padded, 1.15 * static_cast<double>(tokens));
  EXPECT_LT(padded, kSamples * testing::kSequenceWidth / 2);
  EXPECT_LT(slowest, 1.3 * static_cast<double>(padded) / 3);
  // The last step has two samples: each is another rank's.
  const auto last = cut.back()["padded_tokens"].get<std::vector<int64_t>>();
  EXPECT_EQ(cut.back()["samples"], 2);
  EXPECT_EQ(std::count(last.begin(), last.end(), 0), 1);
}

TEST_F(MaxTokensTest, AResumedRunIsTheUninterruptedOne) {
  const std::string whole = folder_.file("whole"), parts = folder_.file("parts");
  const Words common = {"--devices", "cpu:2", "--dp", "2", "--max-tokens", "32", "--epochs", "2"};
  const auto with = [&](Words more) {
    more.insert(more.end(), common.begin(), common.end());
    const ProgramResult result = run(more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  const std::string a = folder_.file("a.jsonl"), b = folder_.file("b.jsonl");
  with({"--checkpoint-dir", whole, "--metrics", a});
  // In the middle of the second epoch.
  with({"--checkpoint-dir", parts, "--metrics", b, "--checkpoint-every", "6"});
  fs::remove_all(parts + "/step-00000008");
  with({"--checkpoint-dir", parts, "--metrics", b, "--resume"});
  EXPECT_EQ(lines(a), lines(b));
  int files = 0;
  for (const auto& entry : fs::directory_iterator(whole + "/step-00000008")) {
    if (entry.path().extension() == ".safetensors") {
      ++files;
      EXPECT_EQ(file_text(entry.path()),
                file_text(parts + "/step-00000008/" + entry.path().filename().string()));
    }
  }
  EXPECT_GT(files, 0);
}

TEST_F(MaxTokensTest, ProcessesTrainWhatThreadsTrain) {
  const Words common = {"--dp", "2", "--max-tokens", "32"};
  const auto with = [&](Words more) {
    more.insert(more.end(), common.begin(), common.end());
    return metrics(more);
  };
  EXPECT_EQ(with({"--devices", "cpu:2"}), with({"--nproc", "2"}));
}

TEST_F(MaxTokensTest, EvaluationCountsEachSampleOnce) {
  const auto evaluate = [&](const Words& more) {
    Words words = {"eval", model_, "--data", data_, "--bind", "S=16", "--batch-size", "16"};
    words.insert(words.end(), more.begin(), more.end());
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out);
  };
  const auto padded = evaluate({"--precision", "fp64", "--format", "json"});
  const auto cut = evaluate(
      {"--precision", "fp64", "--format", "json", "--max-tokens", "32", "--devices", "cpu:3"});
  EXPECT_NEAR(padded["loss"].get<double>(), cut["loss"].get<double>(), 1e-12);
  EXPECT_EQ(padded["accuracy"], cut["accuracy"]);
}

TEST_F(MaxTokensTest, LengthsComeFromAnArrayAMaskOrTheLabels) {
  const auto rewrite = [&](const std::string& keep) {
    const std::string file = folder_.file("part.npz");
    const std::string command = "/usr/bin/python3 -c \"import numpy as np\nd = np.load('" + data_ +
                                "')\nnp.savez('" + file + "', **{k: d[k] for k in '" + keep +
                                "'.split()})\"";
    EXPECT_EQ(std::system(command.c_str()), 0);
    return run({"--data", file, "--max-tokens", "32", "--steps", "1"});
  };
  EXPECT_THAT(rewrite("tokens labels lengths").err, HasSubstr("tokens array 'lengths'"));
  EXPECT_THAT(rewrite("tokens labels attention_mask").err,
              HasSubstr("tokens array 'attention_mask'"));
  EXPECT_THAT(rewrite("tokens labels").err, HasSubstr("the ignored labels of array 'labels'"));
  const ProgramResult next_token = rewrite("tokens lengths");
  EXPECT_EQ(next_token.exit_code, 2);
  EXPECT_THAT(next_token.err, HasSubstr("give integer labels"));
}

// A GPT written by `trainrt model`, whose sequence dim is symbolic.
class SymbolicModelTest : public MaxTokensTest {
 protected:
  std::string write_gpt(const std::string& more) {
    const std::string file = folder_.file("gpt.onnx");
    write_model("gpt2 --layers 2 --hidden 16 --heads 2 --seq 16 --vocab 20 " + more, file);
    return file;
  }
};

TEST_F(SymbolicModelTest, ItTrainsAsTheOneWithAFixedLengthDoes) {
  const auto course = [&](const std::string& how, const Words& bind) {
    const std::string log = folder_.file("gpt.jsonl");
    Words words = {"run", write_gpt(how), "--steps", "4", "--batch-size", "4", "--metrics", log};
    words.insert(words.end(), bind.begin(), bind.end());
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<nlohmann::json> steps = lines(log);
    for (nlohmann::json& step : steps) {
      step.erase("peak_bytes");  // positions are a constant of their own
    }
    return steps;
  };
  EXPECT_EQ(course("", {}), course("--symbolic-seq", {"--bind", "sequence=16"}));
}

TEST_F(SymbolicModelTest, ItsLossUnderTensorParallelPlansIsThatOfWholePaddedBatches) {
  const std::string file = write_gpt("--symbolic-seq"), log = folder_.file("gpt.jsonl");
  const auto course = [&](const Words& more) {
    Words words = {"run",
                   file,
                   "--data",
                   data_,
                   "--input",
                   "input_ids=tokens",
                   "--bind",
                   "sequence=16",
                   "--batch-size",
                   "16",
                   "--threads",
                   "1",
                   "--metrics",
                   log,
                   "--precision",
                   "fp64"};
    words.insert(words.end(), more.begin(), more.end());
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return lines(log);
  };
  const auto padded = course({});
  for (const Words& split :
       {Words{"--devices", "cpu:2", "--tp", "2"},
        Words{"--devices", "cpu:4", "--dp", "2", "--tp", "2", "--zero", "1"}}) {
    Words words = split;
    words.insert(words.end(), {"--max-tokens", "48"});
    expect_same_course(padded, course(words), 1e-9, split[1]);
  }
}

TEST_F(MaxTokensTest, WhatCannotBeDoneIsRefused) {
  const auto refused = [&](const Words& more, int exit_code, const std::string& message) {
    const ProgramResult result = run(more);
    EXPECT_EQ(result.exit_code, exit_code) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  };
  refused({"--max-tokens", "15"}, 2, "the longest sample has 16 tokens");
  refused({"--max-tokens", "32", "--micro-batch-size", "4"}, 2, "give one");
  refused({"--max-tokens", "32", "--reduction", "exact", "--devices", "cpu:2", "--dp", "2"},
          3,
          "--reduction exact");
  std::string fixed = testing::sequence_model();
  fixed.replace(fixed.find("N, S]"), 5, "N, 16]");
  write_text(model_, fixed);
  const ProgramResult result =
      run_trainrt({"run", model_, "--data", data_, "--max-tokens", "32", "--batch-size", "16"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("export it with a dynamic sequence dim"));
}

}  // namespace
}  // namespace trainrt
