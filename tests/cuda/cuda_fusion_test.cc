// Fused element-wise kernels: on the double as their host form, and their text by the real NVRTC,
// which needs no GPU.
#include <dlfcn.h>
#include <nvrtc.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "graph/fused_elementwise.h"
#include "graph/op_def.h"
#include "runtime/compiled_ranks.h"
#include "runtime/load_cuda.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_devices.h"
#include "tests/cuda/cuda_training_run.h"
#include "tests/support/device_case.h"
#include "tests/support/elementwise_steps.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The real library, apart from the double's functions of the same names.
class Nvrtc {
 public:
  bool is_there() const { return library_ != nullptr; }

  // What a text becomes.
  struct Result {
    std::string objection;  // "": none
    std::string ptx;
  };
  Result compile(const cuda_double::CompiledText& text, const std::string& arch) const {
    std::vector<const char*> names, headers, options;
    for (const auto& [name, header] : text.headers) {
      names.push_back(name.c_str());
      headers.push_back(header.c_str());
    }
    const std::string target = "--gpu-architecture=" + arch;
    for (const std::string& given : text.options) {
      options.push_back(given.starts_with("--gpu-architecture") ? target.c_str() : given.c_str());
    }
    const int num_headers = static_cast<int>(names.size());
    nvrtcProgram program = nullptr;
    real(&nvrtcCreateProgram, "nvrtcCreateProgram")(
        &program, text.text.c_str(), "kernel.cu", num_headers, headers.data(), names.data());
    const nvrtcResult result = real(&nvrtcCompileProgram, "nvrtcCompileProgram")(
        program, static_cast<int>(options.size()), options.data());
    size_t bytes = 0;
    real(&nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize")(program, &bytes);
    std::string log(bytes, '\0');
    real(&nvrtcGetProgramLog, "nvrtcGetProgramLog")(program, log.data());
    Result compiled;
    if (result != NVRTC_SUCCESS || bytes > 1) {
      compiled.objection = log + "of\n" + text.text;
    } else {
      real(&nvrtcGetPTXSize, "nvrtcGetPTXSize")(program, &bytes);
      compiled.ptx.resize(bytes);
      real(&nvrtcGetPTX, "nvrtcGetPTX")(program, compiled.ptx.data());
    }
    real(&nvrtcDestroyProgram, "nvrtcDestroyProgram")(&program);
    return compiled;
  }

 private:
  template <typename Fn>
  Fn* real(Fn*, const char* name) const {
    return reinterpret_cast<Fn*>(dlsym(library_, name));
  }
  void* library_ = dlopen(TRAINRT_NVRTC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
};

void expect_compiles(const std::vector<cuda_double::CompiledText>& texts) {
  const Nvrtc nvrtc;
  if (!nvrtc.is_there()) {
    GTEST_SKIP() << "no NVRTC on this machine";
  }
  ASSERT_FALSE(texts.empty());
  std::set<std::string> seen;
  for (const cuda_double::CompiledText& text : texts) {
    for (const char* arch : {"sm_80", "sm_90", "sm_100"}) {
      if (seen.insert(arch + text.text).second) {
        ASSERT_EQ(nvrtc.compile(text, arch).objection, "") << arch;
      }
    }
  }
}

class CudaStepTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cuda_double::reset(); }
  void TearDown() override { EXPECT_EQ(cuda_double::alive(), ""); }
};

TEST_P(CudaStepTest, EqualsTheReferenceKernel) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  expect_reference_results(as_step(GetParam()), *device);
}

TEST_P(CudaStepTest, HasTheBitsOfSingleKernels) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  expect_bits_of_single_kernels(as_step(GetParam()), *device);
}

INSTANTIATE_TEST_SUITE_P(Elementwise,
                         CudaStepTest,
                         ::testing::ValuesIn(elementwise_ops()),
                         [](const auto& row) { return test_name(row.param); });

// All functors, each on the result of the one before it, as many as fit into a kernel; one element
// to a thread, since the rows are odd, which is quicker to compile.
TEST(CudaFunctorTest, CompilesForAllArchitectures) {
  cuda_double::reset();
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  std::vector<FusedStep> steps;
  for (const std::string& name : elementwise_ops()) {
    const OpExample example = as_step(name).examples[0];
    if (name != "Cast") {
      steps.push_back(FusedExpression::of(example.attributes).steps[0]);
    }
  }
  OpDef fused = get_op(kFusedElementwise);
  for (size_t next = 0; next < steps.size();) {
    FusedExpression expression{2, {{"Add", {}, {0, 1}}}, {}};
    for (int last = 2; expression.steps.size() < FusedExpression::kMaxSteps && next < steps.size();
         ++last, ++next) {
      expression.steps.push_back(steps[next]);
      std::vector<int>& operands = expression.steps.back().operands;
      std::fill(operands.begin(), operands.end(), last);
    }
    expression.outputs = {static_cast<int>(expression.steps.size()) - 1};
    const OpExample example{.name = "functors",
                            .attributes = expression.to_attributes(),
                            .inputs = {{DType::kFloat32, {3, 5}}, {DType::kFloat32, {3, 1}}}};
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      run_on_device(make_case(fused, example, dtype), *device);
    }
  }
  expect_compiles(cuda_double::compiled_texts());
}

// Threads keep their packs in registers, and load them as one word each: of inputs as large as the
// result, and of those that are repeated along outer dims.
TEST(CudaPackTest, LiesInRegistersAndIsLoadedAsAWhole) {
  const Nvrtc nvrtc;
  if (!nvrtc.is_there()) {
    GTEST_SKIP() << "no NVRTC on this machine";
  }
  cuda_double::reset();
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const FusedExpression expression{
      4, {{"Add", {}, {0, 1}}, {"Mul", {}, {4, 2}}, {"Add", {}, {5, 3}}}, {2}};
  const auto run = [&](const Shape& row) {
    const OpExample example{.name = "packs",
                            .attributes = expression.to_attributes(),
                            .inputs = {{DType::kFloat32, {3, 5, 8}},
                                       {DType::kFloat32, row},
                                       {DType::kFloat32, {3, 5, 1}},
                                       {DType::kFloat32, {}}}};
    const NodeCase test_case = make_case(get_op(kFusedElementwise), example);
    EXPECT_TRUE(tensors_near(run_on_device(test_case, *device).at(0),
                             run_case(test_case).at(0),
                             kernel_tolerance(DType::kFloat32)));
  };
  run({8});
  run({3, 1, 8});
  const std::vector<cuda_double::CompiledText> texts = cuda_double::compiled_texts();
  ASSERT_EQ(texts.size(), 2u);
  for (const cuda_double::CompiledText& text : texts) {
    const Nvrtc::Result compiled = nvrtc.compile(text, "sm_90");
    ASSERT_EQ(compiled.objection, "");
    EXPECT_THAT(compiled.ptx, Not(HasSubstr(".local"))) << text.text;
    int words = 0;
    for (size_t at = 0; (at = compiled.ptx.find("ld.global.v4", at)) != std::string::npos; ++at) {
      ++words;
    }
    EXPECT_EQ(words, 2) << text.text;
  }
}

class CudaFusionTest : public CudaTrainingTest {
 protected:
  // Texts of a training step in bf16, which has casts.
  std::vector<cuda_double::CompiledText> texts_of(const std::string& family,
                                                  const std::vector<std::string>& sizes) {
    cuda_double::reset();
    train(
        model(family, sizes),
        kGpu,
        {"--steps", "1", "--batch-size", "4", "--precision", "bf16", "--algorithm-cache", "none"});
    return cuda_double::compiled_texts();
  }
};

bool has_steps(const std::vector<cuda_double::CompiledText>& texts,
               const std::vector<std::string>& functors) {
  return std::any_of(texts.begin(), texts.end(), [&](const auto& text) {
    return std::all_of(functors.begin(), functors.end(), [&](const std::string& functor) {
      return text.text.find("trainrt::" + functor) != std::string::npos;
    });
  });
}

TEST_F(CudaFusionTest, GatedLayersAreOneKernelForwardAndBackward) {
  const std::vector<cuda_double::CompiledText> texts = texts_of("llama", kTinyGpt);
  EXPECT_TRUE(has_steps(texts, {"Swish>", "Mul{}"}));
  EXPECT_TRUE(has_steps(texts, {"SwishGrad>", "Mul{}"}));
  expect_compiles(texts);
}

// Steps of chains that a program has, and nodes that they make up.
struct Chains {
  int64_t steps = 0, nodes = 0;
};

Chains chains_of(const std::vector<std::string>& arguments) {
  const Options options = options_of(arguments);
  const TrainingJob job = make_training_job(options, JobUse::kTrain);
  const std::vector<DeviceOptions> devices = run_devices(options, {});
  const auto compiled = compile_ranks(
      job, choose_plan(options, job, devices), devices, {options.batch_size}, std::nullopt);
  Chains chains;
  for (const Node& node : compiled[0].programs[0]->variants[0].graph.nodes()) {
    if (node.op_type == kFusedElementwise) {
      ++chains.nodes;
      chains.steps += static_cast<int64_t>(FusedExpression::of(node.attributes).steps.size());
    }
  }
  return chains;
}

// Every step of a chain but one is a launch that is not made.
TEST_F(CudaFusionTest, AStepOfASmallGptLaunchesFewerKernels) {
  const auto saved_by = [this](const std::string& family) {
    const std::vector<std::string> arguments =
        run_arguments(model(family, kTinyGpt),
                      kGpu,
                      {"--steps", "1", "--batch-size", "4", "--precision", "bf16"});
    const Chains chains = chains_of(arguments);
    cuda_double::reset();
    run_here(arguments);
    EXPECT_LT(chains.nodes, cuda_double::num_launches());
    return chains.steps - chains.nodes;
  };
  EXPECT_GE(saved_by("gpt2"), 2);
  EXPECT_GE(saved_by("llama"), 10);
}

TEST_F(CudaFusionTest, KernelsAreCompiledOnceAndKept) {
  const std::string path = model("llama", kTinyGpt);
  const std::vector<std::string> steps = {"--steps", "2", "--batch-size", "4"};
  const Course first = train(path, kGpu, steps);
  const size_t compiled = cuda_double::compiled_texts().size();
  ASSERT_GT(compiled, 0u);
  const std::vector<std::string> options = cuda_double::compiled_texts()[0].options;
  ASSERT_GT(options.size(), 1u);
  std::set<std::string> texts;
  for (const cuda_double::CompiledText& text : cuda_double::compiled_texts()) {
    EXPECT_TRUE(texts.insert(text.text).second) << text.text;
  }
  cuda_double::reset();
  EXPECT_EQ(train(path, kGpu, steps).losses, first.losses);
  EXPECT_EQ(cuda_double::compiled_texts().size(), 0u);
  // A kept file names what else the code depends on.
  for (const auto& kept : std::filesystem::directory_iterator(folder_.file("algorithms.kernels"))) {
    std::ifstream file(kept.path(), std::ios::binary);
    std::string line;
    std::getline(file, line);
    for (const std::string& option : options) {
      EXPECT_THAT(line, HasSubstr(option));
    }
  }
  // Of a damaged file, or another version's, nothing is believed.
  cuda_double::reset();
  for (const auto& kept : std::filesystem::directory_iterator(folder_.file("algorithms.kernels"))) {
    std::filesystem::resize_file(kept.path(), std::filesystem::file_size(kept.path()) / 2);
  }
  EXPECT_EQ(train(path, kGpu, steps).losses, first.losses);
  EXPECT_EQ(cuda_double::compiled_texts().size(), compiled);
}

// The driver translates for a GPU that NVRTC does not know yet.
TEST_F(CudaFusionTest, NewerGpusGetIntermediateCode) {
  const std::string path = model("llama", kTinyGpt);
  cuda_double::reset({.compute_major = 13});
  train(path, kGpu, {"--steps", "1", "--batch-size", "2"});
  ASSERT_FALSE(cuda_double::compiled_texts().empty());
  EXPECT_EQ(cuda_double::compiled_texts()[0].options[0], "--gpu-architecture=compute_100");
}

TEST_F(CudaFusionTest, AFailureOfAnyCallEndsInOneError) {
  const std::string path = model("llama", kTinyGpt);
  const std::vector<std::string> steps = {
      "--steps", "1", "--batch-size", "2", "--algorithm-cache", "none"};
  expect_clean_failures([&] { train(path, kGpu, steps); }, 2, 53);
}

}  // namespace
}  // namespace trainrt::testing
