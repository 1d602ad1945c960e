#include "runtime/launcher.h"

#include <netdb.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <memory>

#include "graph/base/log.h"
#include "runtime/machine.h"
#include "runtime/version.h"

namespace trainrt {

namespace {

constexpr int kDefaultPort = 29500;

// The variables of one launcher, read with their names in the messages.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    const std::optional<std::string> value = environment_(name);
    return value && !value->empty() ? value : std::nullopt;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }

  // Ranks, sizes and ports fit into an int.
  std::optional<int64_t> number(const std::string& name,
                                int64_t most = std::numeric_limits<int>::max()) const {
    const std::optional<std::string> found = text(name);
    if (!found) {
      return std::nullopt;
    }
    int64_t value = 0;
    const auto [end, status] = std::from_chars(found->data(), found->data() + found->size(), value);
    const bool is_number =
        status != std::errc::invalid_argument && end == found->data() + found->size();
    TRAINRT_REQUIRE(is_number,
                    kInvalidArgument,
                    "the environment variable ",
                    name,
                    " is '",
                    *found,
                    "'; wanted an integer");
    TRAINRT_REQUIRE(status == std::errc() && value <= most && value >= -most,
                    kInvalidArgument,
                    "the environment variable ",
                    name,
                    " is ",
                    *found,
                    ", which is out of range; wanted at most ",
                    most);
    return value;
  }
  int require(const std::string& name, const std::string& launcher) const {
    const std::optional<int64_t> value = number(name);
    TRAINRT_REQUIRE(value.has_value(),
                    kInvalidArgument,
                    launcher,
                    " started this process, but the environment variable ",
                    name,
                    " is not set");
    return static_cast<int>(*value);
  }
  // The first of `names` that is set.
  std::optional<int64_t> first_number(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (const std::optional<int64_t> value = number(name)) {
        return value;
      }
    }
    return std::nullopt;
  }

 private:
  const Environment& environment_;
};

// Jobs of one host shall not meet on one port: a port that depends on the job's name (FNV-1a).
int port_of(const std::string& job) {
  if (job.empty()) {
    return kDefaultPort;
  }
  uint32_t hash = 2166136261u;
  for (const char c : job) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  }
  return 20000 + static_cast<int>(hash % 10000);
}

// "HOST:PORT", "[IPv6]:PORT" or "HOST".
void set_address(const std::string& text, RankPlace& place) {
  const size_t colon = text.rfind(':');
  const bool bracketed = !text.empty() && text.front() == '[';
  const bool has_port =
      colon != std::string::npos && (bracketed ? text[colon - 1] == ']' : text.find(':') == colon);
  place.host = has_port ? text.substr(0, colon) : text;
  if (bracketed) {
    place.host = place.host.substr(1, place.host.size() - 2);
  }
  if (has_port) {
    const auto [end, status] =
        std::from_chars(text.data() + colon + 1, text.data() + text.size(), place.port);
    TRAINRT_REQUIRE(status == std::errc() && end == text.data() + text.size(),
                    kInvalidArgument,
                    "TRAINRT_ADDRESS is '",
                    text,
                    "'; wanted HOST:PORT");
  }
}

std::string own_host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

// This host's name with its domain, as far as the resolver knows it.
std::string full_host_name(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) {
    return host;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, ::freeaddrinfo);
  return found->ai_canonname != nullptr ? found->ai_canonname : host;
}

void take_master(const Variables& variables, const std::string& prefix, RankPlace& place) {
  place.host = variables.text(prefix + "MASTER_ADDR").value_or("");
  place.port = static_cast<int>(variables.number(prefix + "MASTER_PORT").value_or(0));
}

Launch own_launch(const Variables& variables) {
  Launch launch;
  launch.launcher = "trainrt";
  launch.place.rank = variables.require("TRAINRT_RANK", launch.launcher);
  launch.place.world_size = variables.require("TRAINRT_WORLD_SIZE", launch.launcher);
  launch.place.listening_fd =
      static_cast<int>(variables.number("TRAINRT_LISTENING_FD").value_or(-1));
  take_master(variables, "", launch.place);
  return launch;
}

Launch torchrun_launch(const Variables& variables) {
  Launch launch;
  launch.launcher = "torchrun";
  RankPlace& place = launch.place;
  place.rank = variables.require("RANK", launch.launcher);
  place.world_size = variables.require("WORLD_SIZE", launch.launcher);
  take_master(variables, "", place);
  place.port = place.port == 0 ? kDefaultPort : place.port;
  const std::string agent = variables.text("TORCHELASTIC_USE_AGENT_STORE").value_or("");
  if (agent == "True" || agent == "1") {
    ++place.port;  // the agent itself listens at MASTER_PORT
  }
  place.job = variables.text("TORCHELASTIC_RUN_ID").value_or("");
  // Agents of several hosts count restarts each for itself; there the number tells nothing.
  const int64_t local = variables.number("LOCAL_WORLD_SIZE").value_or(place.world_size);
  if (local == place.world_size) {
    place.generation = variables.number("TORCHELASTIC_RESTART_COUNT").value_or(0);
  }
  launch.ends_with_parent = variables.has("TORCHELASTIC_RUN_ID");  // an agent's child
  return launch;
}

Launch mpi_launch(const Variables& variables,
                  const std::string& launcher,
                  const std::string& rank,
                  std::initializer_list<const char*> sizes,
                  std::initializer_list<const char*> local_sizes) {
  Launch launch;
  launch.launcher = launcher;
  RankPlace& place = launch.place;
  place.rank = variables.require(rank, launcher);
  const std::optional<int64_t> size = variables.first_number(sizes);
  TRAINRT_REQUIRE(size.has_value(),
                  kInvalidArgument,
                  launcher,
                  " started this process as rank ",
                  place.rank,
                  " but does not say of how many: set TRAINRT_WORLD_SIZE");
  place.world_size = static_cast<int>(*size);
  place.job = variables.text("OMPI_MCA_ess_base_jobid")
                  .value_or(variables.text("PMIX_NAMESPACE").value_or(""));
  take_master(variables, "", place);
  if (place.host.empty() && variables.first_number(local_sizes) == size) {
    place.host = "127.0.0.1";
  }
  return launch;
}

std::optional<int64_t> slurm_tasks(const Variables& variables) {
  return variables.first_number({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
}

Launch slurm_launch(const Variables& variables) {
  Launch launch;
  launch.launcher = "Slurm";
  RankPlace& place = launch.place;
  place.rank = variables.require("SLURM_PROCID", launch.launcher);
  place.world_size = static_cast<int>(slurm_tasks(variables).value_or(1));
  place.job = variables.text("SLURM_JOB_ID").value_or("");
  if (const std::optional<std::string> step = variables.text("SLURM_STEP_ID")) {
    place.job += "." + *step;
  }
  place.generation = variables.number("SLURM_RESTART_COUNT").value_or(0);
  take_master(variables, "", place);
  if (place.host.empty()) {
    const std::optional<std::string> hosts = variables.has("SLURM_STEP_NODELIST")
                                                 ? variables.text("SLURM_STEP_NODELIST")
                                                 : variables.text("SLURM_JOB_NODELIST");
    place.host = hosts ? first_host(*hosts) : "";
  }
  return launch;
}

// "3", or a range "3:3": the number of hosts does not change while a run goes on.
int kubeflow_hosts(const Variables& variables) {
  const std::string text = variables.text("PET_NNODES").value_or("");
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    return variables.require("PET_NNODES", "Kubeflow");
  }
  const Environment least = [&](const std::string&) { return text.substr(0, colon); };
  TRAINRT_REQUIRE(text.substr(0, colon) == text.substr(colon + 1),
                  kInvalidArgument,
                  "PET_NNODES is '",
                  text,
                  "', a range; a run keeps the hosts that it began with: set PET_NNODES to one "
                  "number (leave minReplicas and maxReplicas out of the job, or make them equal)");
  return Variables(least).require("PET_NNODES", "Kubeflow");
}

// As torchrun counts: "cpu" is a rank for each core, "gpu" one for each GPU, and "auto" the latter
// where there are GPUs, else the former. All pods have to come to the same number.
int kubeflow_local_ranks(const Variables& variables) {
  const std::string text = variables.text("PET_NPROC_PER_NODE").value_or("1");
  if (text != "auto" && text != "cpu" && text != "gpu") {
    TRAINRT_REQUIRE(text.find_first_not_of("-0123456789") == std::string::npos,
                    kInvalidArgument,
                    "PET_NPROC_PER_NODE is '",
                    text,
                    "'; wanted a number of ranks for each pod, auto, cpu or gpu");
    return static_cast<int>(variables.number("PET_NPROC_PER_NODE").value_or(1));
  }
  const int gpus = text == "cpu" ? 0 : static_cast<int>(describe_machine().gpus.size());
  TRAINRT_REQUIRE(text != "gpu" || gpus > 0,
                  kInvalidArgument,
                  "PET_NPROC_PER_NODE is 'gpu', and this pod has none; set it to a number, or to "
                  "cpu for a rank on each core");
  return gpus > 0 ? gpus : num_usable_cores();
}

Launch kubeflow_launch(const Variables& variables) {
  Launch launch;
  launch.launcher = "Kubeflow";
  const int node = variables.require("PET_NODE_RANK", launch.launcher);
  const int nodes = kubeflow_hosts(variables);
  launch.num_local = kubeflow_local_ranks(variables);
  TRAINRT_REQUIRE(launch.num_local >= 1,
                  kInvalidArgument,
                  "PET_NPROC_PER_NODE is ",
                  launch.num_local,
                  "; wanted at least 1");
  TRAINRT_REQUIRE(node >= 0 && node < nodes &&
                      int64_t{nodes} * launch.num_local <= std::numeric_limits<int>::max(),
                  kInvalidArgument,
                  "PET_NODE_RANK ",
                  node,
                  " of PET_NNODES ",
                  nodes,
                  " with PET_NPROC_PER_NODE ",
                  launch.num_local,
                  " is no place of a job");
  launch.place.rank = node * launch.num_local;
  launch.place.world_size = nodes * launch.num_local;
  take_master(variables, "PET_", launch.place);
  if (launch.place.port == 0) {
    launch.place.port = kDefaultPort;
  }
  return launch;
}

// An indexed job, or a stateful set, whose pods are called NAME-0, NAME-1, ...
Launch kubernetes_launch(const Variables& variables, int64_t world_size) {
  Launch launch;
  launch.launcher = "Kubernetes";
  RankPlace& place = launch.place;
  place.world_size = static_cast<int>(world_size);
  take_master(variables, "", place);
  place.port = place.port == 0 ? kDefaultPort : place.port;
  const std::string host = variables.text("HOSTNAME").value_or(own_host_name());
  const size_t dash = host.rfind('-');
  const std::string ordinal = dash == std::string::npos ? "" : host.substr(dash + 1);
  const bool numbered =
      !ordinal.empty() && ordinal.find_first_not_of("0123456789") == std::string::npos;
  if (const std::optional<int64_t> index = variables.number("JOB_COMPLETION_INDEX")) {
    place.rank = static_cast<int>(*index);
  } else {
    TRAINRT_REQUIRE(numbered && ordinal.size() < 9,
                    kInvalidArgument,
                    "the pod's name '",
                    host,
                    "' does not end in a number that could be the rank; use an indexed job or a "
                    "stateful set, or set TRAINRT_RANK");
    place.rank = std::atoi(ordinal.c_str());
  }
  if (place.host.empty() && numbered) {
    const std::string full = full_host_name(host);
    const size_t dot = full.find('.');
    place.host = host.substr(0, dash) + "-0" + (dot == std::string::npos ? "" : full.substr(dot));
  }
  return launch;
}

// N processes that each train alone write into one checkpoint folder. Our own variable says that
// they were to be one training; others' are also set where each is meant to be alone.
void require_or_tell_what_is_missing(const Variables& variables) {
  TRAINRT_REQUIRE(variables.number("TRAINRT_WORLD_SIZE").value_or(1) == 1,
                  kInvalidArgument,
                  "TRAINRT_WORLD_SIZE is ",
                  variables.text("TRAINRT_WORLD_SIZE").value_or(""),
                  ", but nothing says which rank this process is: set TRAINRT_RANK, or leave both "
                  "out to train with one process");
  constexpr std::pair<const char*, const char*> kHalves[] = {
      {"RANK", "WORLD_SIZE"},
      {"WORLD_SIZE", "RANK"},
      {"PMI_RANK", "PMI_SIZE"},
      {"PET_NODE_RANK", "PET_NNODES"},
      {"JOB_COMPLETION_INDEX", "TRAINRT_WORLD_SIZE"},
  };
  for (const auto& [set, missing] : kHalves) {
    const bool says_one = std::string_view(set).ends_with("SIZE") && variables.number(set) == 1;
    if (variables.has(set) && !variables.has(missing) && !says_one) {
      log_warning("the environment has ",
                  set,
                  " but not ",
                  missing,
                  ": this process trains alone, as do all others that were started with it");
    }
  }
}

std::optional<Launch> launch_by_rule(const Variables& variables) {
  // A batch script has the job's variables without being one of its tasks.
  const bool slurm_script =
      variables.text("ENVIRONMENT") == "BATCH" && !variables.has("SLURM_STEP_ID");
  const std::optional<int64_t> world_size =
      variables.first_number({"TRAINRT_WORLD_SIZE", "WORLD_SIZE"});
  if (variables.has("TRAINRT_RANK")) {
    return own_launch(variables);
  }
  if (variables.has("RANK") && variables.has("WORLD_SIZE")) {
    return torchrun_launch(variables);
  }
  if (variables.has("OMPI_COMM_WORLD_RANK")) {
    Launch launch = mpi_launch(variables,
                               "Open MPI",
                               "OMPI_COMM_WORLD_RANK",
                               {"OMPI_COMM_WORLD_SIZE"},
                               {"OMPI_COMM_WORLD_LOCAL_SIZE"});
    launch.ends_with_parent = true;
    return launch;
  }
  if (variables.has("PMI_RANK") && variables.has("PMI_SIZE")) {
    // Slurm speaks PMI, too (srun --mpi=pmi2), and says more. Under MPICH's mpiexec its tasks are
    // the hosts.
    if (variables.number("PMI_RANK") == variables.number("SLURM_PROCID") &&
        variables.number("PMI_SIZE") == slurm_tasks(variables)) {
      return slurm_launch(variables);
    }
    return mpi_launch(variables, "MPI", "PMI_RANK", {"PMI_SIZE"}, {"MPI_LOCALNRANKS"});
  }
  if (variables.has("SLURM_PROCID") && !slurm_script) {
    return slurm_launch(variables);
  }
  if (variables.has("PMIX_RANK")) {
    Launch launch = mpi_launch(variables,
                               "PMIx",
                               "PMIX_RANK",
                               {"TRAINRT_WORLD_SIZE", "WORLD_SIZE", "PMIX_SIZE"},
                               {"PMIX_LOCAL_SIZE"});
    launch.ends_with_parent = true;
    return launch;
  }
  if (variables.has("PET_NODE_RANK") && variables.has("PET_NNODES")) {
    return kubeflow_launch(variables);
  }
  const bool in_pod = variables.has("KUBERNETES_SERVICE_HOST");
  if (world_size && (variables.has("JOB_COMPLETION_INDEX") || in_pod)) {
    return kubernetes_launch(variables, *world_size);
  }
  require_or_tell_what_is_missing(variables);
  return std::nullopt;
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

std::string cache_file(const Environment& environment, const std::string& name) {
  if (const auto folder = environment("XDG_CACHE_HOME"); folder && !folder->empty()) {
    return *folder + "/trainrt/" + name;
  }
  const auto home = environment("HOME");
  return home && !home->empty() ? *home + "/.cache/trainrt/" + name : "";
}

std::optional<Launch> find_launch(const Environment& environment) {
  const Variables variables(environment);
  std::optional<Launch> launch = launch_by_rule(variables);
  if (!launch) {
    return std::nullopt;
  }
  RankPlace& place = launch->place;
  if (const std::optional<int64_t> size = variables.number("TRAINRT_WORLD_SIZE")) {
    place.world_size = static_cast<int>(*size);
  }
  if (const std::optional<std::string> job = variables.text("TRAINRT_JOB")) {
    place.job = *job;
  }
  if (const std::optional<int64_t> generation =
          variables.number("TRAINRT_GENERATION", std::numeric_limits<int64_t>::max())) {
    place.generation = *generation;
  }
  place.stop_at = variables.text("TRAINRT_STOP_AT").value_or("");
  if (place.port == 0) {
    place.port = port_of(place.job);
  }
  if (const std::optional<std::string> address = variables.text("TRAINRT_ADDRESS")) {
    set_address(*address, place);
  }
  place.version = version();
  TRAINRT_REQUIRE(place.world_size >= 1 && place.rank >= 0 &&
                      place.rank + launch->num_local <= place.world_size,
                  kInvalidArgument,
                  launch->launcher,
                  " started this process as rank ",
                  place.rank,
                  " of ",
                  place.world_size,
                  "; ranks go from 0 to world size - 1");
  TRAINRT_REQUIRE(place.port >= 1 && place.port <= 65535,
                  kInvalidArgument,
                  "rank 0 is to listen on port ",
                  place.port,
                  "; ports go from 1 to 65535");
  if (place.world_size == 1) {
    return std::nullopt;
  }
  TRAINRT_REQUIRE(!place.host.empty(),
                  kInvalidArgument,
                  launch->launcher,
                  " started this process as rank ",
                  place.rank,
                  " of ",
                  place.world_size,
                  " but does not say where rank 0 is: set TRAINRT_ADDRESS=HOST:PORT or MASTER_ADDR "
                  "(and MASTER_PORT), as in 'mpirun -x MASTER_ADDR=HOST'");
  return launch;
}

std::string first_host(const std::string& list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ',';) {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t close = list.find(']', at);
    const size_t end = list.find_first_of("-,]", at);
    TRAINRT_REQUIRE(close != std::string::npos && end > at + 1,
                    kInvalidArgument,
                    "'",
                    list,
                    "' is no list of hosts such as 'a[1-3],b'");
    host += list.substr(at + 1, end - at - 1);
    at = close + 1;
  }
  return host;
}

std::vector<std::pair<std::string, std::string>> rank_variables(const RankPlace& place) {
  const std::string host =
      place.host.find(':') == std::string::npos ? place.host : "[" + place.host + "]";
  return {{"TRAINRT_RANK", std::to_string(place.rank)},
          {"TRAINRT_WORLD_SIZE", std::to_string(place.world_size)},
          {"TRAINRT_ADDRESS", concat(host, ":", place.port)},
          {"TRAINRT_JOB", place.job},
          {"TRAINRT_GENERATION", std::to_string(place.generation)},
          {"TRAINRT_LISTENING_FD", std::to_string(place.listening_fd)}};
}

}  // namespace trainrt
