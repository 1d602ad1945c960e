// Whatever happens to one rank or to the network, all others end in time and say who and why.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include "parallel/socket.h"
#include "tests/support/paths.h"
#include "tests/support/rank_processes.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using testing::file_text;
using ::testing::HasSubstr;
using testing::RankEnd;
using testing::RankProcesses;
using testing::TemporaryFolder;
using testing::write_text;
using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

constexpr milliseconds kDeadline{2000};
constexpr milliseconds kPatient{60000};

struct Fault {
  int victim = 0;
  int signal = SIGKILL;
  bool while_training = true;  // else counted from the start of the processes
  milliseconds delay{0};
};

std::ostream& operator<<(std::ostream& out, const Fault& fault) {
  return out << (fault.signal == SIGKILL ? "kill" : "stop") << " of rank " << fault.victim << " "
             << fault.delay.count() << " ms after the "
             << (fault.while_training ? "third step" : "start");
}

class RankFailureTest : public ::testing::Test {
 protected:
  RankFailureTest() { write_text(model_, testing::tiny_model()); }

  Words endless_words(const Words& more) const {
    Words words = {"run",
                   model_,
                   "--loss",
                   testing::kTinyLoss,
                   "--threads",
                   "1",
                   "--steps",
                   "2000000",
                   "--deadline",
                   "2"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  static bool reach_steps(const std::string& metrics) {
    for (int i = 0; i < 6000; ++i) {
      const std::string text = file_text(metrics);
      if (std::count(text.begin(), text.end(), '\n') >= 3) {
        return true;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }
  static void wait_for_steps(const std::string& metrics) {
    EXPECT_TRUE(reach_steps(metrics)) << "the ranks do not train";
  }

  // Four ranks, two pipelines of two stages; returns how long the slowest survivor took.
  Clock::duration inject(const Fault& fault) {
    const std::string metrics = folder_.file("m.jsonl");
    ::unlink(metrics.c_str());
    RankProcesses ranks;
    ranks.start_world(4, endless_words({"--dp", "2", "--pp", "2", "--metrics", metrics}));
    const bool trained = !fault.while_training || reach_steps(metrics);
    std::this_thread::sleep_for(fault.delay);
    const auto start = Clock::now();
    ranks.send_signal(fault.victim, fault.signal);
    const std::vector<RankEnd> ends = ranks.wait(kPatient, fault.victim);
    Clock::duration slowest{0};
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != fault.victim) {
        const RankEnd& end = ends[static_cast<size_t>(rank)];
        EXPECT_TRUE(trained) << "rank " << rank << " did not train: " << end.result.err;
        EXPECT_TRUE(end.ended) << fault << ": rank " << rank << " hangs";
        EXPECT_EQ(end.result.exit_code, 5) << fault << ", rank " << rank << ": " << end.result.err;
        EXPECT_THAT(end.result.err,
                    AllOf(HasSubstr("error: "), HasSubstr("rank " + std::to_string(fault.victim))))
            << fault << ", rank " << rank;
        slowest = std::max(slowest, end.time - start);
      }
    }
    return slowest;
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_F(RankFailureTest, AKilledOrStoppedRankIsNamedByAllOthers) {
  for (const Fault& fault : {Fault{0, SIGKILL},
                             Fault{2, SIGKILL, true, milliseconds(33)},
                             Fault{0, SIGSTOP},
                             Fault{3, SIGSTOP, true, milliseconds(21)}}) {
    inject(fault);
  }
}

TEST_F(RankFailureTest, TheMessageTellsWhatTheRankDidAndWhoWaits) {
  const std::string metrics = folder_.file("m.jsonl");
  RankProcesses ranks;
  ranks.start_world(2, endless_words({"--dp", "2", "--metrics", metrics}));
  wait_for_steps(metrics);
  std::this_thread::sleep_for(milliseconds(600));  // it tells what it does now and then
  ranks.send_signal(1, SIGSTOP);
  const std::vector<RankEnd> ends = ranks.wait(kPatient, 1);
  EXPECT_THAT(ends[0].result.err,
              ::testing::ContainsRegex("rank 0 waited 2 s in [a-z_]+ #[0-9]+ of .*for rank 1: "
                                       "rank 1 \\(process [0-9]+ on .*\\) has given no sign of "
                                       "life for [0-9.]+ s.*it was last .*[a-z_]+ #[0-9]+"));
}

TEST_F(RankFailureTest, NprocKillsWhatCannotEndAndTellsItsCode) {
  const std::string metrics = folder_.file("m.jsonl");
  const pid_t pid = testing::start_trainrt(
      endless_words({"--nproc", "3", "--dp", "3", "--metrics", metrics}), folder_.path());
  wait_for_steps(metrics);
  // The parent's children, in the order of their ranks.
  const std::string id = std::to_string(pid);
  const std::string children = file_text("/proc/" + id + "/task/" + id + "/children");
  ASSERT_NE(children, "");
  ::kill(std::atoi(children.c_str()), SIGSTOP);
  const testing::ProgramResult result = testing::finish_trainrt(pid, folder_.path());
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("rank 0 is stopped and is killed"));
  EXPECT_THAT(result.err, HasSubstr("[rank 1] error: "));
  EXPECT_THAT(result.err, HasSubstr("[rank 2] error: "));
}

TEST_F(RankFailureTest, AStopSignalToTheParentSavesAndLeaves) {
  const std::string metrics = folder_.file("m.jsonl");
  const pid_t pid = testing::start_trainrt(endless_words({"--nproc",
                                                          "2",
                                                          "--dp",
                                                          "2",
                                                          "--metrics",
                                                          metrics,
                                                          "--checkpoint-dir",
                                                          folder_.file("c")}),
                                           folder_.path());
  wait_for_steps(metrics);
  ::kill(pid, SIGTERM);
  const testing::ProgramResult result = testing::finish_trainrt(pid, folder_.path());
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_THAT(result.out, HasSubstr("continue with --resume"));
}

TEST_F(RankFailureTest, AStopSignalToOneRankStopsAllAfterTheSameStep) {
  const std::string metrics = folder_.file("m.jsonl");
  RankProcesses ranks;
  ranks.start_world(
      3, endless_words({"--dp", "3", "--metrics", metrics, "--checkpoint-dir", folder_.file("c")}));
  wait_for_steps(metrics);
  ranks.send_signal(2, SIGTERM);
  for (const RankEnd& end : ranks.wait(kPatient)) {
    EXPECT_EQ(end.result.exit_code, 128 + SIGTERM) << end.result.err;
  }
}

// Every rank says the same of ranks that were started with different things.
TEST_F(RankFailureTest, DifferentStartsAreToldBeforeTraining) {
  const std::string other = folder_.file("other.onnx");
  std::string text = testing::tiny_model();
  text.replace(text.find("Tanh"), 4, "Relu");
  write_text(other, text);
  struct Row {
    Words first, second;
    std::string difference;
  };
  const Words base = {"run", model_, "--loss", "mse", "--dp", "2", "--steps", "1"};
  const auto with = [&](const Words& more) {
    Words words = base;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  Words other_model = base;
  other_model[1] = other;
  for (const Row& row : {Row{base, other_model, "the model (its hash)"},
                         Row{base, with({"--lr", "0.5"}), "--lr is '0.001' on rank 0 and '0.5'"},
                         Row{base, with({"--zero", "1"}), "--zero is 'unset' on rank 0 and '1'"}}) {
    const std::string port = std::to_string(testing::free_port());
    RankProcesses ranks;
    for (int rank = 0; rank < 2; ++rank) {
      Words command = {testing::trainrt_binary()};
      const Words& words = rank == 0 ? row.first : row.second;
      command.insert(command.end(), words.begin(), words.end());
      ranks.start(command,
                  {{"TRAINRT_RANK", std::to_string(rank)},
                   {"TRAINRT_WORLD_SIZE", "2"},
                   {"TRAINRT_ADDRESS", "127.0.0.1:" + port}});
    }
    for (const RankEnd& end : ranks.wait(kPatient)) {
      EXPECT_EQ(end.result.exit_code, 2) << end.result.err;
      EXPECT_THAT(end.result.err, AllOf(HasSubstr(row.difference), HasSubstr("on rank 1")));
    }
  }
}

// The data are found missing after the ranks have met, the others before.
TEST_F(RankFailureTest, ARankThatCannotBeginTellsTheOthers) {
  struct Row {
    int rank;
    Words more;
    std::string says;
  };
  for (const Row& row : {Row{1, {"--data", folder_.file("none.npz")}, "none.npz"},
                         Row{1, {"--no-such-flag"}, "--no-such-flag"},
                         Row{0, {"another.onnx"}, "another.onnx"}}) {
    RankProcesses ranks;
    const std::string port = std::to_string(testing::free_port());
    for (int rank = 0; rank < 2; ++rank) {
      Words command = {
          testing::trainrt_binary(), "run", model_, "--loss", "mse", "--dp", "2", "--steps", "1"};
      if (rank == row.rank) {
        command.insert(command.end(), row.more.begin(), row.more.end());
      }
      ranks.start(command,
                  {{"RANK", std::to_string(rank)},
                   {"WORLD_SIZE", "2"},
                   {"MASTER_ADDR", "127.0.0.1"},
                   {"MASTER_PORT", port}});
    }
    for (const RankEnd& end : ranks.wait(kPatient)) {
      EXPECT_TRUE(end.ended) << row.says;
      EXPECT_EQ(end.result.exit_code, 2) << end.result.err;
      EXPECT_THAT(end.result.err, HasSubstr(row.says));
    }
  }
}

// What a rank may be doing when it dies or stops, from its start to its first steps: the names are
// those of activities (RankPlace::stop_at).
struct Moment {
  const char* name;
  const char* activity;
  std::vector<int> victims = {0, 2};
};

void PrintTo(const Moment& moment, std::ostream* out) {
  *out << moment.activity;
}

class RankFailureAtTest : public RankFailureTest, public ::testing::WithParamInterface<Moment> {
 protected:
  static constexpr int kWorld = 4;

  Words words(const std::string& deadline) const {
    Words all = endless_words({"--dp", "2", "--pp", "2"});
    *(std::find(all.begin(), all.end(), "--deadline") + 1) = deadline;
    return all;
  }

  void expect_named(const std::vector<RankEnd>& ends, int victim) const {
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank != victim) {
        const RankEnd& end = ends[static_cast<size_t>(rank)];
        EXPECT_TRUE(end.ended) << "rank " << rank << " does not notice the end of " << victim;
        EXPECT_EQ(end.result.exit_code, 5) << end.result.err;
        EXPECT_THAT(end.result.err,
                    AllOf(HasSubstr("error: "), HasSubstr("rank " + std::to_string(victim))))
            << "on rank " << rank;
      }
    }
  }
};

// Its end is noticed by itself, long before the deadline.
TEST_P(RankFailureAtTest, ADeadRankIsNamedLongBeforeTheDeadline) {
  for (const int victim : GetParam().victims) {
    RankProcesses ranks;
    ranks.start_world(kWorld, words("3600"), {{victim, GetParam().activity}});
    ASSERT_TRUE(ranks.wait_until_stopped(victim, kPatient));
    ranks.send_signal(victim, SIGKILL);
    expect_named(ranks.wait(kPatient, victim), victim);
  }
}

// The deadline is long enough for slow machines to get there.
using RankStopAtTest = RankFailureAtTest;

TEST_P(RankStopAtTest, AStoppedRankIsNamedAtTheDeadline) {
  const int victim = 2;
  RankProcesses ranks;
  ranks.start_world(kWorld, words("5"), {{victim, GetParam().activity}});
  ASSERT_TRUE(ranks.wait_until_stopped(victim, kPatient));
  expect_named(ranks.wait(kPatient, victim), victim);
}

// A rank that begins what another died in must not wait for it, though the notice came before.
using RankFailureBeforeTest = RankFailureAtTest;

TEST_P(RankFailureBeforeTest, ADeadRankIsNamedByOneThatBeginsTheSame) {
  const int victim = 3, late = 1;
  RankProcesses ranks;
  ranks.start_world(
      kWorld, words("3600"), {{late, GetParam().activity}, {victim, GetParam().activity}});
  ASSERT_TRUE(ranks.wait_until_stopped(victim, kPatient));
  ASSERT_TRUE(ranks.wait_until_stopped(late, kPatient));
  ranks.send_signal(victim, SIGKILL);
  ranks.send_signal(late, SIGCONT);
  expect_named(ranks.wait(kPatient, victim), victim);
}

INSTANTIATE_TEST_SUITE_P(
    Start,
    RankStopAtTest,
    ::testing::Values(Moment{"Joining", "waiting for all ranks to come"},
                      Moment{"Comparing", "in comparison of what each rank was started with"},
                      Moment{"Connecting", "connecting to all ranks"},
                      Moment{"SharingMemory", "in all_reduce #1 of ranks"},
                      Moment{"Training", "computing, after recv"}),
    [](const auto& row) { return std::string(row.param.name); });

INSTANTIATE_TEST_SUITE_P(Start,
                         RankFailureBeforeTest,
                         ::testing::Values(Moment{"Addresses", "in exchange of addresses"},
                                           Moment{"Connecting", "connecting to all ranks"}),
                         [](const auto& row) { return std::string(row.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Start,
    RankFailureAtTest,
    // While rank 0 has let nobody in, its death is that of one that never came.
    ::testing::Values(Moment{"Joining", "waiting for all ranks to come", {2}},
                      Moment{"Preparing", "starting"},
                      Moment{"Comparing", "in comparison of what each rank was started with"},
                      Moment{"Compiling", "preparing, after comparison"},
                      Moment{"Addresses", "in exchange of addresses"},
                      Moment{"Connecting", "connecting to all ranks"},
                      Moment{"FirstCollective", "in all_gather #0 of ranks"},
                      Moment{"SharingMemory", "in all_reduce #1 of ranks"},
                      Moment{"Grouping", "computing, after all_gather #0 of group"},
                      Moment{"Training", "computing, after recv"}),
    [](const auto& row) { return std::string(row.param.name); });

struct BadWorld {
  const char* name;
  Words options;
  testing::Variables variables;
  int exit_code;
  Words says;
};

void PrintTo(const BadWorld& row, std::ostream* out) {
  *out << row.name;
}

class BadWorldTest : public ::testing::TestWithParam<BadWorld> {};

TEST_P(BadWorldTest, EndsInOneClearMessage) {
  const TemporaryFolder folder;
  const std::string model = folder.file("tiny.onnx"), plan = folder.file("plan.json");
  write_text(model, testing::tiny_model());
  write_text(plan, R"({"version": 1, "data_parallel": 4, "global_batch": 32})");
  const Socket taken = Socket::listening(0);
  Words command = {testing::trainrt_binary(), "run", model, "--loss", "mse", "--deadline", "1"};
  for (const std::string& word : GetParam().options) {
    command.push_back(word == "%plan" ? plan : word);
  }
  testing::Variables variables = GetParam().variables;
  for (auto& [name, value] : variables) {
    value = value == "%taken"  ? std::to_string(taken.local_port())
            : value == "%free" ? std::to_string(testing::free_port())
                               : value;
  }
  RankProcesses ranks;
  ranks.start(command, variables);
  const RankEnd end = ranks.wait(kPatient)[0];
  EXPECT_EQ(end.result.exit_code, GetParam().exit_code) << end.result.err;
  for (const std::string& part : GetParam().says) {
    EXPECT_THAT(end.result.err, HasSubstr(part));
  }
}

testing::Variables rank_of_two(const std::string& rank,
                               const std::string& host,
                               const std::string& port) {
  return {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", host}, {"MASTER_PORT", port}};
}

INSTANTIATE_TEST_SUITE_P(
    Program,
    BadWorldTest,
    ::testing::Values(
        BadWorld{"PortInUse", {}, rank_of_two("0", "127.0.0.1", "%taken"), 5, {"in use"}},
        BadWorld{"NobodyListens",
                 {},
                 rank_of_two("1", "127.0.0.1", "%free"),
                 5,
                 {"rank 1 could not join rank 0 at 127.0.0.1:", "Connection refused"}},
        BadWorld{"UnreachableAddress",
                 {},
                 rank_of_two("1", "192.0.2.1", "29500"),  // reserved for documentation
                 5,
                 {"rank 1 could not join rank 0 at 192.0.2.1:29500"}},
        BadWorld{"SilentAddress",  // it listens and takes nothing
                 {},
                 rank_of_two("1", "127.0.0.1", "%taken"),
                 5,
                 {"rank 1 could not join rank 0 at 127.0.0.1:", "there is no answer"}},
        BadWorld{"UnknownHost",
                 {},
                 rank_of_two("1", "no-such-host.invalid", "29500"),
                 5,
                 {"no-such-host.invalid"}},
        BadWorld{"MissingRank",
                 {},
                 rank_of_two("0", "127.0.0.1", "%free"),
                 5,
                 {"rank 1 of 2 has not come within 1 s"}},
        BadWorld{"RankBeyondWorld", {}, rank_of_two("2", "127.0.0.1", "1"), 2, {"rank 2 of 2"}},
        BadWorld{"NprocUnderALauncher",
                 {"--nproc", "2"},
                 rank_of_two("0", "127.0.0.1", "%free"),
                 2,
                 {"--nproc 2", "torchrun"}},
        BadWorld{"PlanForAnotherWorld",
                 {"--nproc", "2", "--plan", "%plan"},
                 {},
                 2,
                 {"is for 4 devices, there are 2", "--nproc 4"}},
        BadWorld{"ThreadsInProcesses",
                 {"--nproc", "2", "--devices", "cpu:2"},
                 {},
                 2,
                 {"--devices cpu:2", "2 processes"}},
        BadWorld{"DegreesForAnotherWorld",
                 {"--nproc", "3", "--dp", "2"},
                 {},
                 2,
                 {"2 devices, there are 3"}}),
    [](const auto& row) { return std::string(row.param.name); });

// Two hosts, each a network of its own, joined by one cable.
class TwoHostsTest : public RankFailureTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) {
      GTEST_SKIP() << "making networks needs root";
    }
    const std::string id = std::to_string(::getpid());
    for (const char* host : {"a", "b"}) {
      hosts_.push_back("trainrt-" + id + host);
      if (!ip("netns add " + hosts_.back())) {
        hosts_.pop_back();
        GTEST_SKIP() << "this machine does not let root make networks";
      }
    }
    ASSERT_TRUE(
        ip("link add tr-a netns " + hosts_[0] + " type veth peer name tr-b netns " + hosts_[1]));
    for (size_t h = 0; h < 2; ++h) {
      const std::string in = "-n " + hosts_[h] + " ", name = h == 0 ? "tr-a" : "tr-b";
      ASSERT_TRUE(ip(in + "addr add 10.77.0." + std::to_string(h + 1) + "/24 dev " + name));
      ASSERT_TRUE(ip(in + "link set lo up") && ip(in + "link set " + name + " up"));
    }
  }
  void TearDown() override {
    for (const std::string& host : hosts_) {
      ip("netns del " + host);
    }
  }

  static bool ip(const std::string& arguments) {
    return std::system(("ip " + arguments + " 2>/dev/null").c_str()) == 0;
  }

  // Ranks 0 and 1 on the first host, 2 and 3 on the second.
  void start(RankProcesses& ranks, const Words& words) {
    for (int rank = 0; rank < 4; ++rank) {
      Words command = {"ip", "netns", "exec", hosts_[rank < 2 ? 0 : 1], testing::trainrt_binary()};
      command.insert(command.end(), words.begin(), words.end());
      ranks.start(command,
                  {{"RANK", std::to_string(rank)},
                   {"WORLD_SIZE", "4"},
                   {"MASTER_ADDR", rank == 0 ? "127.0.0.1" : "10.77.0.1"},
                   {"MASTER_PORT", "29517"}});
    }
  }

  std::vector<std::string> hosts_;
};

TEST_F(TwoHostsTest, TrainTogether) {
  RankProcesses ranks;
  start(ranks, {"run", model_, "--loss", "mse", "--dp", "2", "--pp", "2", "--steps", "5"});
  std::string out;
  for (const RankEnd& end : ranks.wait(kPatient)) {
    EXPECT_EQ(end.result.exit_code, 0) << end.result.err;
    out += end.result.out;
  }
  EXPECT_THAT(out, HasSubstr("trained 5 steps"));
}

TEST_F(TwoHostsTest, ACutCableEndsBothSides) {
  const std::string metrics = folder_.file("m.jsonl");
  RankProcesses ranks;
  Words words = endless_words({"--dp", "2", "--pp", "2", "--metrics", metrics});
  words[std::find(words.begin(), words.end(), "--deadline") - words.begin() + 1] = "30";
  start(ranks, words);
  wait_for_steps(metrics);
  ASSERT_TRUE(ip("-n " + hosts_[0] + " link set tr-a down"));
  const std::vector<RankEnd> ends = ranks.wait(milliseconds(20000));
  for (size_t rank = 0; rank < 4; ++rank) {
    // Long before the deadline: the hosts' silence is noticed.
    EXPECT_TRUE(ends[rank].ended) << "rank " << rank;
    EXPECT_EQ(ends[rank].result.exit_code, 5) << ends[rank].result.err;
    EXPECT_THAT(ends[rank].result.err, HasSubstr("out of reach"));
    EXPECT_THAT(ends[rank].result.err,
                ::testing::ContainsRegex(rank < 2 ? "rank [23] \\(" : "rank 0 \\(at 10.77.0.1:"));
  }
}

class LongRankFailureTest : public RankFailureTest {};

TEST_F(LongRankFailureTest, AnyRankAtAnyMoment) {
  const auto number = [](const char* name, unsigned fallback) {
    const char* text = std::getenv(name);
    return text == nullptr ? fallback : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  };
  std::mt19937 random(number("TRAINRT_FAULT_SEED", 20240601));
  const unsigned cases = number("TRAINRT_FAULT_CASES", 200);
  std::vector<double> after_kill, after_stop;  // seconds until the slowest survivor had ended
  for (unsigned i = 0; i < cases; ++i) {
    Fault fault;
    fault.victim = static_cast<int>(random() % 4);
    fault.signal = random() % 2 == 0 ? SIGKILL : SIGSTOP;
    fault.while_training = random() % 4 != 0;
    fault.delay = milliseconds(random() % (fault.while_training ? 200 : 600));
    const Clock::duration took = inject(fault);
    EXPECT_LE(took, kDeadline + std::chrono::seconds(2)) << "case " << i << ": " << fault;
    (fault.signal == SIGKILL ? after_kill : after_stop)
        .push_back(std::chrono::duration<double>(took).count());
  }
  for (auto& [name, all] : {std::pair{"kill", &after_kill}, {"stop", &after_stop}}) {
    std::sort(all->begin(), all->end());
    const auto quantile = [&all = *all](double share) {
      return all.at(static_cast<size_t>(share * static_cast<double>(all.size() - 1)));
    };
    std::cout << all->size() << " x " << name << ", seconds to the slowest survivor's end: median "
              << quantile(0.5) << ", 95 % " << quantile(0.95) << ", longest " << quantile(1)
              << " (deadline " << std::chrono::duration<double>(kDeadline).count() << ")\n";
  }
}

}  // namespace
}  // namespace trainrt
