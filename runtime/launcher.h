// Which rank of which job this process is, as whoever started it says. The only reader of
// environment variables.
//
// | launcher | rank, world size | where rank 0 listens |
// |---|---|---|
// | trainrt's own | TRAINRT_RANK, TRAINRT_WORLD_SIZE | TRAINRT_ADDRESS=HOST:PORT |
// | torchrun, Kubeflow v1 | RANK, WORLD_SIZE | MASTER_ADDR, MASTER_PORT |
// | Open MPI | OMPI_COMM_WORLD_RANK, _SIZE | MASTER_ADDR, or this host when all ranks are here |
// | MPICH, Intel MPI | PMI_RANK, PMI_SIZE, which Slurm sets too | the same |
// | PMIx | PMIX_RANK; size from another rule's variable | the same |
// | Slurm | SLURM_PROCID, SLURM_NTASKS | first host of SLURM_JOB_NODELIST, port from the job id |
// | Kubeflow v2 | PET_NODE_RANK, PET_NNODES x PET_NPROC_PER_NODE | PET_MASTER_ADDR, _PORT |
// | Kubernetes | JOB_COMPLETION_INDEX or the pod's ordinal; TRAINRT_WORLD_SIZE | pod 0 of the job |
//
// The first rule that applies is taken. TRAINRT_ADDRESS, TRAINRT_WORLD_SIZE, TRAINRT_JOB and
// TRAINRT_GENERATION overrule what the other rules say. TRAINRT_STOP_AT is for tests of failures
// (RankPlace::stop_at).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/rendezvous.h"

namespace trainrt {

using Environment = std::function<std::optional<std::string>(const std::string& name)>;

Environment process_environment();

// A file that this program keeps between runs, in $XDG_CACHE_HOME/trainrt or ~/.cache/trainrt; ""
// where there is neither.
std::string cache_file(const Environment& environment, const std::string& name);

struct Launch {
  std::string launcher;  // its name, for messages
  RankPlace place;
  // Ranks to be started on this host, the first being place.rank; 1: this process is the rank.
  int num_local = 1;
  // The launcher is this process's parent; without it nobody would end the rank.
  bool ends_with_parent = false;
};

// Nothing when no launcher started this process, or started it alone. Throws kInvalidArgument for
// variables that contradict each other or lack something.
std::optional<Launch> find_launch(const Environment& environment);

// The first host of a Slurm list: b1 of "b[1-3,07],c".
std::string first_host(const std::string& list);

// The variables that make a process rank `rank` of `place`'s job.
std::vector<std::pair<std::string, std::string>> rank_variables(const RankPlace& place);

}  // namespace trainrt
