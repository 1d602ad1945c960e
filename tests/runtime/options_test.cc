#include "runtime/options.h"

#include <gmock/gmock.h>

#include "graph/base/error.h"
#include "runtime/config_file.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr unsigned kRunGroups = kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions;

Options parse(const std::vector<std::string>& arguments) {
  return parse_options("run", kRunGroups, arguments);
}

std::string message_of(const std::function<void()>& action, ErrorCode code) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(OptionsTest, DefaultsAreThoseOfTheContract) {
  const Options options = parse({"m.onnx"});
  EXPECT_THAT(options.arguments, ElementsAre("m.onnx"));
  EXPECT_EQ(options.data, "synthetic");
  EXPECT_EQ(options.optimizer, "adamw");
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.batch_size, 32);
  EXPECT_EQ(options.reduction, "fast");
  EXPECT_EQ(options.deadline, 60);
  EXPECT_FALSE(options.steps.has_value());
}

TEST(OptionsTest, FlagsWinOverSetAndSetOverTheFile) {
  const testing::TemporaryFolder folder;
  testing::write_text(folder.file("c.yaml"), "lr: 0.1\nmomentum: 0.5\nseed: 7\n");
  const Options options = parse({"m.onnx",
                                 "--config",
                                 folder.file("c.yaml"),
                                 "--set",
                                 "lr=0.2",
                                 "--set",
                                 "momentum=0.6",
                                 "--lr",
                                 "0.3"});
  EXPECT_EQ(options.lr, 0.3);
  EXPECT_EQ(options.momentum, 0.6);
  EXPECT_EQ(options.seed, 7);
}

TEST(OptionsTest, GroupsOfTheFileMapToFlags) {
  Options options;
  apply_config(
      "parallel: {strategy: hybrid, data_workers: 2, model_shards: 3, pipeline_stages: 4}\n"
      "optim: {name: sgd, lr: 0.5, weight_decay: 0.1, nesterov: true}\n"
      "precision: {dtype: fp16, init_scale: 1024, growth_threshold: 4}\n"
      "batch_size: 12\n"
      "bind: {seq: 16}\n"
      "trainable: [a*, b*]\n",
      "c.yaml",
      options);
  EXPECT_EQ(options.dp, 2);
  EXPECT_EQ(options.tp, 3);
  EXPECT_EQ(options.pp, 4);
  EXPECT_EQ(options.optimizer, "sgd");
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_EQ(options.weight_decay, 0.1);
  EXPECT_TRUE(options.nesterov);
  EXPECT_EQ(options.precision, "fp16");
  EXPECT_EQ(options.init_scale, 1024);
  EXPECT_EQ(options.growth_factor, 4);
  EXPECT_EQ(options.batch_size, 12);
  EXPECT_THAT(options.bind, ElementsAre("seq=16"));
  EXPECT_THAT(options.trainable, ElementsAre("a*", "b*"));
}

TEST(OptionsTest, StrategyPinsTheOtherDegrees) {
  Options options;
  apply_config("parallel: {strategy: data}", "c.yaml", options);
  EXPECT_EQ(options.tp, 1);
  EXPECT_EQ(options.pp, 1);
  EXPECT_FALSE(options.dp.has_value());
  Options contradiction;
  EXPECT_THAT(message_of(
                  [&] {
                    apply_config(
                        "parallel: {strategy: data, model_shards: 2}", "c.yaml", contradiction);
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("contradicts tp = 2"));
}

TEST(OptionsTest, DisabledPrecisionIsFullPrecision) {
  Options options;
  apply_config("precision: {enabled: false, dtype: fp16}", "c.yaml", options);
  EXPECT_EQ(options.precision, "fp32");
}

TEST(OptionsTest, EnabledIsTrueOrFalseInYamlsWords) {
  for (const char* no : {"no", "off", "False"}) {
    Options options;
    apply_config(concat("precision: {dtype: fp16, enabled: ", no, "}"), "c.yaml", options);
    EXPECT_EQ(options.precision, "fp32") << no;
  }
  Options on;
  apply_config("precision: {enabled: True, dtype: fp16}", "c.yaml", on);
  EXPECT_EQ(on.precision, "fp16");
}

TEST(OptionsTest, ValuesOfAnotherKindAreRefused) {
  const auto message = [](const char* text) {
    return message_of(
        [&] {
          Options options;
          apply_config(text, "c.yaml", options);
        },
        ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(message("precision: {enabled: maybe}"), HasSubstr("is 'maybe'; wanted true or"));
  EXPECT_THAT(message("precision: {enabled: [false]}"), HasSubstr("is a list; wanted true or"));
  EXPECT_THAT(message("parallel: {strategy: {a: 1}}"), HasSubstr("'strategy' is a map"));
  EXPECT_THAT(message("bind: {S: [1, 2]}"), HasSubstr("'bind' is a list; wanted NAME: VALUE"));
  EXPECT_THAT(message("optim: sgd"), HasSubstr("'optim' is a group; wanted its keys, as in"));
}

TEST(OptionsTest, AKeyThatIsGivenTwiceIsRefused) {
  for (const char* text : {"lr: 1\nseed: 2\nlr: 2\n",
                           "lr: 1\nseed: 2\noptim: {lr: 2}\n",
                           "batch_size: 1\nseed: 2\nbatch-size: 2\n",
                           "optim:\n  lr: 1\n  lr: 2\n"}) {
    Options options;
    EXPECT_THAT(
        message_of([&] { apply_config(text, "c.yaml", options); }, ErrorCode::kInvalidArgument),
        AllOf(HasSubstr("c.yaml:3: '"), HasSubstr("is given twice, first at c.yaml:")))
        << text;
  }
}

TEST(OptionsTest, UnknownNamesAreErrorsWithNearNames) {
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--batchsize", "3"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("--batch-size"));
  EXPECT_THAT(message_of(
                  [] {
                    Options options;
                    apply_config("lr: 1\nwarmup_step: 3\n", "c.yaml", options);
                  },
                  ErrorCode::kInvalidArgument),
              AllOf(HasSubstr("c.yaml:2"), HasSubstr("warmup_step"), HasSubstr("warmup-steps")));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--set", "optim.lrr=1"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("'lr'"));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--set", "optm.lr=1"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("'optim'"));
}

TEST(OptionsTest, ValuesAreChecked) {
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--lr", "fast"});
                  },
                  ErrorCode::kInvalidArgument),
              AllOf(HasSubstr("--lr"), HasSubstr("fast"), HasSubstr("a number")));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--batch-size", "0"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("1 to 2147483647"));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--batch-size", "1099511627776"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("1 to 2147483647"));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--dp", "4294967297"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("1 to 2147483647"));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--optimizer", "adamm"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("adam"));
  EXPECT_THAT(message_of(
                  [] {
                    parse({"m.onnx", "--zero", "4"});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("0 to 3"));
}

TEST(OptionsTest, ResolvedConfigurationReadsBack) {
  const Options options = parse({"m.onnx",
                                 "--lr",
                                 "0.1",
                                 "--dp",
                                 "2",
                                 "--trainable",
                                 "a*",
                                 "--nesterov",
                                 "--data",
                                 "text:a \"b\".txt"});
  const std::string text = resolved_config(options, kRunGroups);
  Options again;
  apply_config(text, "printed", again);
  EXPECT_EQ(resolved_config(again, kRunGroups), text);
  EXPECT_EQ(again.lr, 0.1);
  EXPECT_EQ(again.dp, 2);
  EXPECT_EQ(again.data, "text:a \"b\".txt");
}

}  // namespace
}  // namespace trainrt
