// What each launcher's variables mean.
#include "runtime/launcher.h"

#include <gmock/gmock.h>

#include <map>

#include "runtime/machine.h"
#include "runtime/version.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using Map = std::map<std::string, std::string>;

std::optional<Launch> launch(const Map& variables) {
  return find_launch([&](const std::string& name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional<std::string>(at->second);
  });
}

std::string refusal(const Map& variables) {
  try {
    launch(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(LauncherTest, NoVariablesNoLaunch) {
  EXPECT_FALSE(launch({}));
  EXPECT_FALSE(launch({{"RANK", "0"}}));
  EXPECT_FALSE(launch({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "h"}}));
}

TEST(LauncherTest, HalfOfALaunchIsRefusedOrTold) {
  EXPECT_THAT(refusal({{"TRAINRT_WORLD_SIZE", "2"}}), HasSubstr("set TRAINRT_RANK"));
  EXPECT_FALSE(launch({{"TRAINRT_WORLD_SIZE", "1"}}));
  const auto told = [](const Map& variables) {
    ::testing::internal::CaptureStderr();
    EXPECT_FALSE(launch(variables));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(told({{"JOB_COMPLETION_INDEX", "0"}}), HasSubstr("not TRAINRT_WORLD_SIZE"));
  EXPECT_THAT(told({{"WORLD_SIZE", "4"}}), HasSubstr("has WORLD_SIZE but not RANK"));
  EXPECT_THAT(told({{"PMI_RANK", "1"}}), HasSubstr("not PMI_SIZE"));
  EXPECT_EQ(told({{"WORLD_SIZE", "1"}}), "");
}

TEST(LauncherTest, Torchrun) {
  Map variables = {{"RANK", "3"},
                   {"WORLD_SIZE", "4"},
                   {"LOCAL_WORLD_SIZE", "4"},
                   {"MASTER_ADDR", "10.1.2.3"},
                   {"MASTER_PORT", "1234"},
                   {"TORCHELASTIC_RUN_ID", "job7"},
                   {"TORCHELASTIC_RESTART_COUNT", "2"}};
  const RankPlace place = launch(variables)->place;
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world_size, 4);
  EXPECT_EQ(place.host, "10.1.2.3");
  EXPECT_EQ(place.port, 1234);
  EXPECT_EQ(place.job, "job7");
  EXPECT_EQ(place.generation, 2);
  EXPECT_EQ(place.version, version());
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(launch(variables)->place.port, 1235);  // the agent listens at 1234
  variables["LOCAL_WORLD_SIZE"] = "2";             // two hosts, whose agents count apart
  EXPECT_EQ(launch(variables)->place.generation, 0);
}

TEST(LauncherTest, SlurmTakesTheFirstHostAndAPortOfTheJob) {
  const Map variables = {{"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_JOB_ID", "4711"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_JOB_NODELIST", "gpu[007-009,12],login"}};
  const RankPlace place = launch(variables)->place;
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.world_size, 8);
  EXPECT_EQ(place.host, "gpu007");
  EXPECT_GE(place.port, 20000);
  EXPECT_LT(place.port, 30000);
  Map other = variables;
  other["SLURM_JOB_ID"] = "4712";
  EXPECT_NE(launch(other)->place.port, place.port);
  // A batch script is no task of the job.
  Map script = variables;
  script.erase("SLURM_STEP_ID");
  script["ENVIRONMENT"] = "BATCH";
  EXPECT_FALSE(launch(script));
}

TEST(LauncherTest, FirstHostOfAList) {
  EXPECT_EQ(first_host("a"), "a");
  EXPECT_EQ(first_host("a,b[1-2]"), "a");
  EXPECT_EQ(first_host("rack[2-3]-node[05,7],x"), "rack2-node05");
  EXPECT_THROW(first_host("a[1-3"), Error);
}

TEST(LauncherTest, OpenMpiOnOneHostNeedsNoAddress) {
  Map variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                   {"OMPI_MCA_ess_base_jobid", "123"}};
  EXPECT_EQ(launch(variables)->place.host, "127.0.0.1");
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_THAT(refusal(variables), HasSubstr("mpirun -x MASTER_ADDR=HOST"));
  variables["MASTER_ADDR"] = "head";
  EXPECT_EQ(launch(variables)->place.host, "head");
}

TEST(LauncherTest, Hydra) {
  const auto found = launch({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(found->place.rank, 1);
  EXPECT_EQ(found->place.host, "127.0.0.1");
}

// `srun --mpi=pmi2` sets both; MPICH's mpiexec within a Slurm job has the hosts as its tasks.
TEST(LauncherTest, SlurmThatSpeaksPmiIsSlurm) {
  Map variables = {{"PMI_RANK", "1"},
                   {"PMI_SIZE", "2"},
                   {"SLURM_PROCID", "1"},
                   {"SLURM_NTASKS", "2"},
                   {"SLURM_JOB_ID", "7"},
                   {"SLURM_STEP_ID", "0"},
                   {"SLURM_STEP_NODELIST", "b[1-2]"}};
  const auto found = launch(variables);
  EXPECT_EQ(found->launcher, "Slurm");
  EXPECT_EQ(found->place.host, "b1");
  EXPECT_EQ(found->place.job, "7.0");
  variables["PMI_SIZE"] = "8";
  variables["PMI_RANK"] = "5";
  variables["MPI_LOCALNRANKS"] = "8";
  EXPECT_EQ(launch(variables)->launcher, "MPI");
  EXPECT_EQ(launch(variables)->place.rank, 5);
}

TEST(LauncherTest, OnlyALaunchersChildEndsWithIt) {
  const Map torch = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}};
  EXPECT_FALSE(launch(torch)->ends_with_parent);  // Kubeflow v1, or by hand
  Map agent = torch;
  agent["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_TRUE(launch(agent)->ends_with_parent);
  EXPECT_TRUE(
      launch({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}})
          ->ends_with_parent);
  EXPECT_TRUE(launch({{"PMIX_RANK", "0"}, {"TRAINRT_WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}})
                  ->ends_with_parent);
  EXPECT_FALSE(launch({{"TRAINRT_RANK", "0"},
                       {"TRAINRT_WORLD_SIZE", "2"},
                       {"TRAINRT_ADDRESS", "h:1"},
                       {"OMPI_COMM_WORLD_RANK", "0"}})
                   ->ends_with_parent);
}

TEST(LauncherTest, PmixNeedsAWorldSize) {
  EXPECT_THAT(refusal({{"PMIX_RANK", "1"}}), HasSubstr("set TRAINRT_WORLD_SIZE"));
}

TEST(LauncherTest, KubeflowStartsTheRanksOfAPod) {
  const auto found = launch({{"PET_NODE_RANK", "1"},
                             {"PET_NNODES", "3"},
                             {"PET_NPROC_PER_NODE", "2"},
                             {"PET_MASTER_ADDR", "pod0"},
                             {"PET_MASTER_PORT", "29400"}});
  EXPECT_EQ(found->num_local, 2);
  EXPECT_EQ(found->place.rank, 2);
  EXPECT_EQ(found->place.world_size, 6);
  EXPECT_EQ(found->place.host, "pod0");
}

TEST(LauncherTest, KubeflowsWordsAreTorchruns) {
  Map variables = {{"PET_NODE_RANK", "1"},
                   {"PET_NNODES", "2:2"},
                   {"PET_NPROC_PER_NODE", "cpu"},
                   {"PET_MASTER_ADDR", "pod0"}};
  EXPECT_EQ(launch(variables)->num_local, num_usable_cores());
  EXPECT_EQ(launch(variables)->place.world_size, 2 * num_usable_cores());
  const int gpus = static_cast<int>(describe_machine().gpus.size());
  variables["PET_NPROC_PER_NODE"] = "auto";
  EXPECT_EQ(launch(variables)->num_local, gpus > 0 ? gpus : num_usable_cores());
  variables["PET_NPROC_PER_NODE"] = "gpu";
  if (gpus == 0) {
    EXPECT_THAT(refusal(variables), HasSubstr("PET_NPROC_PER_NODE is 'gpu'"));
  }
  variables["PET_NPROC_PER_NODE"] = "many";
  EXPECT_THAT(refusal(variables), HasSubstr("auto, cpu or gpu"));
  variables["PET_NPROC_PER_NODE"] = "1";
  variables["PET_NNODES"] = "2:4";
  EXPECT_THAT(refusal(variables), HasSubstr("PET_NNODES is '2:4'"));
  variables["PET_NNODES"] = ":";
  EXPECT_THAT(refusal(variables), HasSubstr("PET_NNODES"));
}

TEST(LauncherTest, KubernetesNumbersPods) {
  const auto indexed = launch({{"JOB_COMPLETION_INDEX", "2"},
                               {"HOSTNAME", "train-2"},
                               {"TRAINRT_WORLD_SIZE", "4"},
                               {"TRAINRT_JOB", "uid"}});
  EXPECT_EQ(indexed->place.rank, 2);
  EXPECT_EQ(indexed->place.host, "train-0");
  EXPECT_EQ(indexed->place.port, 29500);
  EXPECT_EQ(indexed->place.job, "uid");
  const auto set = launch({{"KUBERNETES_SERVICE_HOST", "10.0.0.1"},
                           {"HOSTNAME", "train-3"},
                           {"WORLD_SIZE", "4"},
                           {"TRAINRT_ADDRESS", "[fd00::1]:77"}});
  EXPECT_EQ(set->place.rank, 3);
  EXPECT_EQ(set->place.host, "fd00::1");
  EXPECT_EQ(set->place.port, 77);
}

TEST(LauncherTest, OwnVariablesComeFirst) {
  const auto found = launch({{"TRAINRT_RANK", "1"},
                             {"TRAINRT_WORLD_SIZE", "2"},
                             {"TRAINRT_ADDRESS", "h:1"},
                             {"RANK", "7"},
                             {"WORLD_SIZE", "8"}});
  EXPECT_EQ(found->place.rank, 1);
  EXPECT_EQ(found->place.host, "h");
}

TEST(LauncherTest, WrongValuesAreNamed) {
  const Map good = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}};
  Map bad = good;
  bad["RANK"] = "zero";
  EXPECT_THAT(refusal(bad), HasSubstr("RANK is 'zero'"));
  bad = good;
  bad["RANK"] = "2";
  EXPECT_THAT(refusal(bad), HasSubstr("rank 2 of 2"));
  bad = good;
  for (const char* large : {"4294967296", "-4294967296", "99999999999999999999"}) {
    bad["RANK"] = large;
    EXPECT_THAT(refusal(bad), HasSubstr(concat("RANK is ", large, ", which is out of range")));
  }
  bad = good;
  bad["WORLD_SIZE"] = "4294967298";
  EXPECT_THAT(refusal(bad), HasSubstr("WORLD_SIZE is 4294967298"));
  bad = good;
  bad["MASTER_PORT"] = "4294996796";
  EXPECT_THAT(refusal(bad), HasSubstr("MASTER_PORT is 4294996796"));
  bad["MASTER_PORT"] = "70000";
  EXPECT_THAT(refusal(bad), HasSubstr("70000"));
  bad = good;
  bad.erase("MASTER_ADDR");
  EXPECT_THAT(refusal(bad), HasSubstr("MASTER_ADDR"));
}

}  // namespace
}  // namespace trainrt
