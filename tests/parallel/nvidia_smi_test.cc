// Clusters described by what nvidia-smi printed.
#include "parallel/nvidia_smi.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::TemporaryFolder;
using testing::write_text;

// Three cards: idle, partly used, and slowed down by heat.
constexpr const char* kQuery =
    "name, memory.total [MiB], memory.used [MiB], clocks.current.sm [MHz], clocks.max.sm [MHz], "
    "clocks.applications.graphics [MHz], clocks_throttle_reasons.sw_thermal_slowdown, "
    "pcie.link.gen.max\n"
    "NVIDIA A100-SXM4-80GB, 81920 MiB, 4 MiB, 210 MHz, 1410 MHz, [N/A], Not Active, 4\n"
    "NVIDIA A100-SXM4-80GB, 81920 MiB, 4096 MiB, 210 MHz, 1410 MHz, 1410 MHz, Not Active, 4\n"
    "NVIDIA A100-SXM4-80GB, 81920 MiB, 4 MiB, 705 MHz, 1410 MHz, 1410 MHz, Active, 4\n";

constexpr const char* kTopology =
    "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV12\tNV12\tPXB\tSYS\t0-31\t0\n"
    "GPU1\tNV12\t X \tNV12\tPXB\tSYS\t0-31\t0\n"
    "GPU2\tNV12\tNV12\t X \tSYS\tPXB\t32-63\t1\n"
    "NIC0\tPXB\tPXB\tSYS\t X \tSYS\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tSYS\t X \t\t\n"
    "\n"
    "Legend:\n"
    "\n"
    "  X    = Self\n"
    "NIC Legend:\n"
    "  NIC0: mlx5_0\n"
    "  NIC1: mlx5_1\n";

constexpr const char* kLog =
    "\n"
    "==============NVSMI LOG==============\n"
    "\n"
    "Driver Version                            : 550.54.15\n"
    "Attached GPUs                             : 1\n"
    "GPU 00000000:07:00.0\n"
    "    Product Name                          : NVIDIA H100 80GB HBM3\n"
    "    PCI\n"
    "        GPU Link Info\n"
    "            PCIe Generation\n"
    "                Max                       : 5\n"
    "                Current                   : 5\n"
    "    FB Memory Usage\n"
    "        Total                             : 81559 MiB\n"
    "        Reserved                          : 551 MiB\n"
    "        Used                              : 1024 MiB\n"
    "        Free                              : 79984 MiB\n"
    "    BAR1 Memory Usage\n"
    "        Total                             : 131072 MiB\n"
    "        Used                              : 2 MiB\n"
    "    Clocks Event Reasons\n"
    "        HW Slowdown                       : Not Active\n"
    "        SW Power Cap                      : Not Active\n"
    "    Clocks\n"
    "        SM                                : 345 MHz\n"
    "    Applications Clocks\n"
    "        Graphics                          : 1485 MHz\n"
    "    Max Clocks\n"
    "        SM                                : 1980 MHz\n";

TEST(NvidiaSmiTest, MemoryHeldByOthersIsNotOurs) {
  const SmiHost host = read_smi_host({"gpus.csv", kQuery}, {});
  ASSERT_EQ(host.devices.size(), 3u);
  EXPECT_EQ(host.devices[0].type.name, "A100-SXM4-80GB");
  EXPECT_EQ(host.devices[1].type.memory_bytes, int64_t{80} << 30);
  EXPECT_EQ(host.devices[1].used_bytes, int64_t{4} << 30);
}

TEST(NvidiaSmiTest, OnlyACardThatIsHeldDownIsSlow) {
  const SmiHost host = read_smi_host({"gpus.csv", kQuery}, {});
  EXPECT_EQ(host.devices[0].type.speed, 1);  // idle: its clock says nothing
  EXPECT_EQ(host.devices[1].type.speed, 1);
  EXPECT_EQ(host.devices[2].type.speed, 0.5);
}

TEST(NvidiaSmiTest, TheMatrixGivesLinksAndNetworkCards) {
  const SmiHost host = read_smi_host({"gpus.csv", kQuery}, {"topo.txt", kTopology});
  EXPECT_EQ(host.intra.kind, LinkKind::kNvLink);
  EXPECT_EQ(host.intra.bandwidth, 300e9);  // 12 links of 25 GB/s
  EXPECT_EQ(host.num_nics, 2);
}

TEST(NvidiaSmiTest, TheSlowestPairSetsThePace) {
  std::string mixed = kTopology;
  mixed.replace(mixed.find("NV12\tNV12\tPXB"), 9, "NV12\tSYS ");
  const SmiHost host = read_smi_host({"gpus.csv", kQuery}, {"topo.txt", mixed});
  EXPECT_EQ(host.intra.kind, LinkKind::kPcie);
  EXPECT_EQ(host.intra.name, "pcie4");
}

TEST(NvidiaSmiTest, TheLongListingIsReadBySection) {
  const SmiHost host = read_smi_host({"q.txt", kLog}, {});
  ASSERT_EQ(host.devices.size(), 1u);
  EXPECT_EQ(host.devices[0].type.memory_bytes, int64_t{81559} << 20);
  EXPECT_EQ(host.devices[0].used_bytes, int64_t{1575} << 20);
  EXPECT_EQ(host.devices[0].type.speed, 1485.0 / 1980);
  EXPECT_EQ(host.devices[0].type.architecture, "hopper");
}

TEST(NvidiaSmiTest, ClusterFilesTakeTheListings) {
  const TemporaryFolder folder;
  write_text(folder.file("gpus.csv"), kQuery);
  write_text(folder.file("topo.txt"), kTopology);
  write_text(
      folder.file("c.yaml"),
      "hosts:\n"
      "  - {count: 2, nvidia_smi: {query: gpus.csv, topo: topo.txt}, inter: ethernet-25g}\n");
  const Topology two = load_cluster(folder.file("c.yaml"));
  EXPECT_EQ(two.num_devices(), 6);
  EXPECT_EQ(two.hosts[1].inter.name, "ethernet-25g");
  EXPECT_EQ(two.device(4).extra_reserved_bytes, int64_t{4} << 30);
  EXPECT_EQ(load_cluster(folder.file("gpus.csv")).num_devices(), 3);
}

TEST(NvidiaSmiTest, BadListingsAreExplained) {
  const TemporaryFolder folder;
  const auto expect = [&](const std::string& query, const std::string& topo, const char* words) {
    try {
      read_smi_host({"gpus.csv", query}, {"topo.txt", topo});
      FAIL() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  expect("memory.total [MiB], memory.used [MiB]\n81920 MiB, 0 MiB\n", "", "no name");
  expect("name, memory.total [MiB]\nVoodoo 2, 8 MiB\n", "", "Voodoo 2");
  expect(kLog, kTopology, "topo.txt: the matrix has 3 GPUs, but the listing gpus.csv has 1");
  expect("==============NVSMI LOG==============\n", "", "lists no GPU");
  expect(kQuery, "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV1\n", "entries for 3 GPUs");
  expect(kQuery, "", "topo.txt: the matrix of `nvidia-smi topo -m` has 0 GPU columns");
  write_text(folder.file("topo.txt"), kTopology);
  EXPECT_THROW(load_cluster(folder.file("topo.txt")), Error);
}

}  // namespace
}  // namespace trainrt
