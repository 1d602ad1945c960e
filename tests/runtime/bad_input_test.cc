// Bad input of any kind ends in one clear message and the exit code of the contract.
#include <gmock/gmock.h>

#include <filesystem>

#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;

struct BadInput {
  const char* name;
  // %M: the model, %D: a folder that exists, %P: its name.
  std::vector<std::string> arguments;
  int exit_code;
  std::vector<std::string> says;  // each part of the message
};

void PrintTo(const BadInput& input, std::ostream* out) {
  *out << input.name;
}

class BadInputTest : public ::testing::TestWithParam<BadInput> {
 protected:
  std::string filled(std::string text) const {
    for (const auto& [mark, value] : {std::pair<std::string, std::string>{"%M", model_},
                                      {"%D", folder_.path()},
                                      {"%P", std::filesystem::path(folder_.path()).filename()}}) {
      for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark)) {
        text.replace(at, 2, value);
      }
    }
    return text;
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_P(BadInputTest, EndsInOneClearMessage) {
  write_text(model_, testing::tiny_model());
  write_text(folder_.file("garbage.onnx"), "\x01\x02 this is no model");
  write_text(folder_.file("config.yaml"), "optimiser: adam\n");
  write_text(folder_.file("small.yaml"),
             "hosts:\n  - {count: 1, devices: [{count: 1, type: cpu, memory: 1000}]}\n");
  write_text(folder_.file("two.yaml"),
             "hosts:\n  - {count: 1, devices: [{count: 1, type: cpu}, {count: 1, type: t4}]}\n");
  std::filesystem::create_directories(folder_.file("empty"));
  std::filesystem::create_symlink("loop", folder_.file("loop"));
  write_text(folder_.file("self.yaml"), "freeze: &a [*a]\n");
  write_text(folder_.file("deep.json"), std::string(100'000, '['));
  write_text(folder_.file("broken.npz"), "PK no archive, but long enough to look for its end");
  std::vector<std::string> arguments;
  for (const std::string& argument : GetParam().arguments) {
    arguments.push_back(filled(argument));
  }
  const ProgramResult result = run_trainrt(arguments);
  EXPECT_EQ(result.exit_code, GetParam().exit_code) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("error: "));
  for (const std::string& part : GetParam().says) {
    EXPECT_THAT(result.err, HasSubstr(filled(part)));
  }
  EXPECT_EQ(testing::file_text(model_), testing::tiny_model());
}

const std::vector<BadInput> kBadInputs = {
    {"Command", {"rum"}, 2, {"unknown command 'rum'", "'run'"}},
    {"NoModel", {"run"}, 2, {"wants MODEL.onnx"}},
    {"TwoModels", {"run", "%M", "other.onnx"}, 2, {"other.onnx"}},
    {"Flag", {"run", "%M", "--batchsize", "3"}, 2, {"--batchsize", "--batch-size"}},
    {"FlagOfAnotherCommand", {"eval", "%M", "--lr", "3"}, 2, {"'trainrt eval' takes no --lr"}},
    {"FlagWithoutValue", {"run", "%M", "--lr"}, 2, {"--lr"}},
    {"Number", {"run", "%M", "--lr", "much"}, 2, {"--lr", "much", "a number"}},
    {"ConfigKey", {"run", "%M", "--config", "%D/config.yaml"}, 2, {"config.yaml:1", "optimizer"}},
    {"NoConfig", {"run", "%M", "--config", "%D/none.yaml"}, 5, {"none.yaml"}},
    {"GarbageModel", {"run", "%D/garbage.onnx"}, 3, {"garbage.onnx"}},
    {"NoModelFile", {"run", "%D/none.onnx"}, 3, {"none.onnx"}},
    {"StepsAndEpochs", {"run", "%M", "--steps", "1", "--epochs", "1"}, 2, {"--steps and --epochs"}},
    {"Loss", {"run", "%M", "--loss", "hinge"}, 2, {"hinge", "mse"}},
    {"NoData", {"run", "%M", "--data", "%D/none"}, 2, {"%D/none", "does not exist"}},
    {"NoTokens",
     {"run", "%M", "--data", "tokens:%D/none.bin"},
     2,
     {"tokens:%D/none.bin' does not exist"}},
    {"NoText", {"run", "%M", "--data", "text:%D/none.txt"}, 2, {"none.txt' does not exist"}},
    {"DataOfUnknownKind", {"run", "%M", "--data", "%M"}, 2, {"F.npz"}},
    {"EmptyFolder", {"run", "%M", "--data", "%D/empty"}, 2, {"train-images"}},
    {"BrokenArchive", {"run", "%M", "--data", "%D/broken.npz"}, 2, {"broken.npz"}},
    {"TextForADenseModel", {"run", "%M", "--data", "text:%M"}, 2, {"no integer input"}},
    {"EvalOfNothing", {"eval", "%M", "--loss", "mse", "--steps", "0"}, 2, {"--steps 0", "eval"}},
    {"TwoArraysForAnInput",
     {"run", "%M", "--input", "x=a", "--input", "x=b"},
     2,
     {"--input gives 'x' twice", "'x=b'"}},
    {"BatchAxisOf33Bits", {"run", "%M", "--batch-axis", "x=4294967296"}, 2, {"4294967296"}},
    {"BatchAxisBelowNone", {"run", "%M", "--batch-axis", "x=-2"}, 2, {"x is -2", "-1 for none"}},
    {"LossOfNoName", {"run", "%M", "--loss", "output:"}, 2, {"--loss output:", "output:NAME"}},
    {"LossScale", {"run", "%M", "--init-scale", "8"}, 2, {"--init-scale", "--precision fp32"}},
    {"BackoffThatKeepsTheScale",
     {"run", "%M", "--precision", "fp16", "--backoff-factor", "1"},
     2,
     {"--backoff-factor is 1", "less than 1"}},
    {"BackoffToNothing",
     {"run", "%M", "--precision", "fp16", "--backoff-factor", "0"},
     2,
     {"--backoff-factor is 0", "more than 0"}},
    {"GraphsOnTheCpu", {"run", "%M", "--cuda-graphs", "off"}, 2, {"--cuda-graphs is for"}},
    {"AlgorithmsOfTheCpu",
     {"run", "%M", "--algorithm-cache", "none"},
     2,
     {"--algorithm-cache is for --devices cuda"}},
    {"CommaBehindDevices", {"run", "%M", "--devices", "cuda:0,1,"}, 2, {"'cuda:0,1,'; wanted"}},
    {"SettingForOps", {"ops", "--set", "format=json"}, 2, {"'trainrt ops' takes no --set"}},
    {"PatternForInspect", {"inspect", "%M", "--freeze", "none*"}, 2, {"'none*' matches no"}},
    {"SizeOfAModel", {"model", "mlp", "-o", "%D/m", "--layers", "9000000000"}, 2, {"--layers is"}},
    {"NoTokenFile", {"run", "%M", "--data", "tokens:%D/none.bin"}, 2, {}},
    {"ResumeWithoutFolder", {"run", "%M", "--resume"}, 2, {"--checkpoint-dir"}},
    {"TooManyRanks", {"run", "%M", "--dp", "2"}, 2, {"2 devices, there are 1", "cpu:N"}},
    {"Devices", {"run", "%M", "--devices", "tpu"}, 2, {"tpu", "cpu:N"}},
    {"NoGpu", {"run", "%M", "--devices", "cuda"}, 5, {"doctor"}},
    {"Precision", {"run", "%M", "--precision", "tf32"}, 2, {"tf32", "--devices cuda", "bf16"}},
    {"Threads", {"run", "%M", "--threads", "100000"}, 2, {"--threads", "0 to 1024"}},
    {"ThreadsOfAllRanks",
     {"run", "%M", "--threads", "1024", "--devices", "cpu:8"},
     2,
     {"--threads 1024", "8 ranks"}},
    {"InfiniteRate", {"run", "%M", "--lr", "inf"}, 2, {"--lr", "finite"}},
    {"RateThatIsNoNumber", {"run", "%M", "--lr", "nan"}, 2, {"--lr", "finite"}},
    {"Beta", {"run", "%M", "--beta1", "1"}, 2, {"--beta1 is 1", "below 1"}},
    {"SeedOf65Bits",
     {"run", "%M", "--seed", "18446744073709551615"},
     2,
     {"--seed", "64-bit integer"}},
    {"SettingOfNoCommand", {"run", "%M", "--set", "heads=3"}, 2, {"unknown key 'heads'"}},
    {"Momentum",
     {"run", "%M", "--optimizer", "sgd", "--momentum", "0.9"},
     2,
     {"--momentum", "--optimizer sgd", "--optimizer momentum"}},
    {"Nesterov", {"run", "%M", "--nesterov"}, 2, {"--nesterov", "--optimizer adamw"}},
    {"MomentumForPlan",
     {"plan", "%M", "--optimizer", "sgd", "--momentum", "0.9"},
     2,
     {"--momentum", "--optimizer sgd"}},
    {"LogicalShards", {"run", "%M", "--logical-shards", "4"}, 2, {"--logical-shards", "exact"}},
    {"ShareOfNothing",
     {"run", "%M", "--loss", "mse", "--devices", "cpu:2", "--shares", "1,0"},
     2,
     {"'1,0'", "greater than 0"}},
    {"ShareBelowNothing",
     {"run", "%M", "--loss", "mse", "--devices", "cpu:2", "--shares", "1,-1"},
     2,
     {"greater than 0"}},
    {"SharesOfOne", {"run", "%M", "--loss", "mse", "--shares", "1"}, 2, {"--shares 1", "cpu:N"}},
    {"DevicesBesideCluster",
     {"plan", "%M", "--loss", "mse", "--devices", "cpu:2", "--cluster", "dgx-a100"},
     2,
     {"--devices cpu:2", "--cluster dgx-a100", "leave one"}},
    {"PriceOfNothing", {"plan", "%M", "--price", "3"}, 2, {"--price", "--objective cost"}},
    {"CostWithoutPrice", {"plan", "%M", "--objective", "cost"}, 2, {"--objective cost", "--price"}},
    {"PriceOfAnotherDevice",
     {"plan", "%M", "--objective", "cost", "--price", "cpus=3"},
     2,
     {"'cpus'", "does not have", "cpu"}},
    {"PriceMissing",
     {"plan", "%M", "--cluster", "%D/two.yaml", "--objective", "cost", "--price", "cpu=3"},
     2,
     {"says nothing of 'T4'"}},
    {"PriceTwice",
     {"plan", "%M", "--objective", "cost", "--price", "cpu=3,cpu=4"},
     2,
     {"'cpu' twice"}},
    {"PriceTwiceByTwoNames",
     {"plan", "%M", "--cluster", "t4", "--objective", "cost", "--price", "t4=3,T4=4"},
     2,
     {"'T4' twice"}},
    {"ThreadsOfGpus",
     {"plan", "%M", "--cluster", "t4", "--threads", "2"},
     2,
     {"--threads", "--cluster t4", "no CPU"}},
    {"ProcessesOfThreads",
     {"plan", "%M", "--devices", "cpu:2", "--nproc", "4"},
     2,
     {"--devices cpu:2", "--nproc 4"}},
    {"ProcessesBesideCluster",
     {"plan", "%M", "--cluster", "cpu:2", "--nproc", "4"},
     2,
     {"2 devices", "--nproc 4"}},
    {"SequenceOfOneRank",
     {"plan", "%M", "--loss", "mse", "--sequence-parallel"},
     2,
     {"--sequence-parallel needs a tensor group"}},
    {"SharesOfTooManyRanks",
     {"plan", "%M", "--loss", "mse", "--devices", "cpu:2", "--shares", "1,2,3"},
     2,
     {"--shares", "3 data ranks"}},
    {"TooFewMicroBatchesFor2bw",
     {"plan",
      "%M",
      "--loss",
      "mse",
      "--devices",
      "cpu:2",
      "--pp",
      "2",
      "--schedule",
      "2bw",
      "--batch-size",
      "8",
      "--micro-batch-size",
      "8"},
     2,
     {"2bw", "each of 2 pipeline stages", "has 1 of them"}},
    {"DataForInspect", {"inspect", "%M", "--data", "%D/none.npz"}, 2, {"--data", "inspect"}},
    {"PageForInspect", {"inspect", "%M", "--format", "html"}, 2, {"--format html", "plan"}},
    {"ModelReplaced", {"run", "%M", "--metrics", "%M"}, 2, {"--metrics", "the model"}},
    {"DataReplaced",
     {"run", "%M", "--data", "text:%D/config.yaml", "--trace", "%D/../%P/config.yaml"},
     2,
     {"--trace", "--data"}},
    {"DataReplacedByEval",
     {"eval", "%M", "--data", "%D/broken.npz", "-o", "%D/broken.npz"},
     2,
     {"-o", "--data"}},
    {"OutputReplaced",
     {"run", "%M", "--metrics", "%D/out", "--trace", "%D/out"},
     2,
     {"--trace", "--metrics"}},
    {"CheckpointsReplaced",
     {"run", "%M", "--checkpoint-dir", "%D/ck", "--export", "%D/ck"},
     2,
     {"--export", "--checkpoint-dir"}},
    {"ModelOfAnotherName", {"model", "foo", "-o", "%D/m.onnx"}, 2, {"'foo'", "--help"}},
    {"MetricsFolder", {"run", "%M", "--metrics", "%D/no/m.jsonl"}, 5, {"%D/no", "--metrics"}},
    {"ExportFolder", {"run", "%M", "--export", "%D/no/m.onnx"}, 5, {"%D/no", "--export"}},
    {"CheckpointUnderAFile", {"run", "%M", "--checkpoint-dir", "%M/ck"}, 5, {"--checkpoint-dir"}},
    {"ExportLoop", {"run", "%M", "--export", "%D/loop"}, 5, {"--export '%D/loop'", "symbolic"}},
    {"MetricsLoop", {"run", "%M", "--metrics", "%D/loop"}, 5, {"--metrics '%D/loop'", "symbolic"}},
    {"ModelLoop", {"model", "mlp", "-o", "%D/loop"}, 5, {"-o '%D/loop'", "symbolic"}},
    {"DataLoop", {"run", "%M", "--data", "%D/loop"}, 2, {"--data '%D/loop'"}},
    {"ClusterLoop", {"plan", "%M", "--cluster", "%D/loop"}, 2, {"'%D/loop'"}},
    {"SelfReference", {"run", "%M", "--config", "%D/self.yaml"}, 2, {"self.yaml:1", "itself"}},
    {"DeepPlan", {"run", "%M", "--plan", "%D/deep.json"}, 2, {"deep.json", "more than 200 deep"}},
    {"EmptyExport", {"run", "%M", "--export", ""}, 2, {"--export", "empty", "F.onnx"}},
    {"EmptyConfig", {"run", "%M", "--config", ""}, 2, {"--config", "empty", "FILE"}},
    {"EmptySetting", {"run", "%M", "--set", "metrics="}, 2, {"--set metrics", "empty"}},
    {"SmallImage", {"model", "cnn", "--image", "3", "-o", "%D/m"}, 2, {"image = 3", "least 4"}},
    {"OutputFolder",
     {"eval", "%M", "--data", "%D/none.npz", "-o", "%D/no/e.json"},
     5,
     {"-o", "folder '%D/no' does not exist"}},
    {"AnnotatedFolder", {"plan", "%M", "--annotate", "%D"}, 5, {"--annotate", "is a folder"}},
    {"MetricsDiskFull",
     {"run", "%M", "--loss", "mse", "--metrics", "/dev/full"},
     5,
     {"/dev/full", "No space left"}},
    {"OutputDiskFull", {"ops", "-o", "/dev/full"}, 5, {"No space left"}},
    {"TooLittleMemory",
     {"run", "%M", "--loss", "mse", "--cluster", "%D/small.yaml"},
     4,
     {"no plan fits", "rank 0 lacks"}},
    {"NonFinite",
     {"run", "%M", "--loss", "mse", "--lr", "1e38", "--optimizer", "sgd"},
     1,
     {"step ", "--lr"}},
};

INSTANTIATE_TEST_SUITE_P(Program,
                         BadInputTest,
                         ::testing::ValuesIn(kBadInputs),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace trainrt
