// Cluster files, presets and the catalogue.
#include "parallel/topology.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "parallel/device_catalogue.h"

namespace trainrt {
namespace {

std::string message_of(const std::string& yaml) {
  try {
    parse_cluster(yaml, "c.yaml");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "accepted";
}

constexpr const char* kExample = R"(
hosts:
  - {count: 16, devices: [{count: 8, type: a100-80gb-sxm}], intra: nvlink3, inter: {type: infiniband-hdr, nics: 8}}
  - {count: 1, devices: [{count: 1, type: rtx-4090, reserved: 4GiB}, {count: 3, type: my-card}], intra: pcie4}
  - {count: 1, devices: [{count: 4, type: cpu, memory: 2GiB, speed: 0.5}]}
devices:
  my-card: {memory: 24GiB, reserved: 1GiB, speed: 0.8, flops: {fp32: 35e12, bf16: 142e12}, memory_bandwidth: 936e9}
)";

TEST(ClusterFileTest, ReadsTheExampleOfTheContract) {
  const Topology t = parse_cluster(kExample, "c.yaml");
  ASSERT_EQ(t.num_devices(), 16 * 8 + 4 + 4);
  EXPECT_EQ(t.type_of(0).name, "A100-SXM4-80GB");
  EXPECT_EQ(t.capacity_bytes(0), int64_t{80} << 30);
  EXPECT_EQ(t.host_of(0).network_bandwidth(), 200e9);
  EXPECT_EQ(t.reserved_bytes(128), t.type_of(128).reserved_bytes + (int64_t{4} << 30));
  EXPECT_EQ(t.type_of(129).name, "my-card");
  EXPECT_DOUBLE_EQ(t.type_of(129).peak_flops("bf16"), 0.8 * 142e12);
  EXPECT_EQ(t.capacity_bytes(133), int64_t{2} << 30);
  EXPECT_EQ(t.reserved_bytes(133), 0);
  EXPECT_DOUBLE_EQ(t.type_of(133).speed, 0.5);
  EXPECT_EQ(t.device(133).name, "cpu:1");
  EXPECT_FALSE(t.is_uniform());
}

TEST(ClusterFileTest, RefusesWhatItDoesNotKnow) {
  EXPECT_NE(message_of("hosts: [{devicse: [{type: t4}]}]").find("did you mean 'devices'"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: [{type: a100-80gb-sxn}]}]").find("did you mean"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: [{type: t4, memory: -1GiB}]}]").find("not negative"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: []").find("no devices"), std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: []}]").find("needs devices"), std::string::npos);
  EXPECT_NE(message_of("hosts: [{count: 0, devices: [{type: t4}]}]").find("above zero"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{count: 1.5, devices: [{type: t4}]}]").find("whole number"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: [{type: t4}], intra: nvlnk3}]").find("nvlink3"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: [{type: x}]}]\ndevices: {x: {memory: 1GiB}}")
                .find("needs flops"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [").find("not YAML"), std::string::npos);
  EXPECT_NE(message_of("hosts:\n  - devices: [{type: t4}]\n    devices: [{type: a100}]\n")
                .find("c.yaml:3: 'devices' is given twice"),
            std::string::npos);
  EXPECT_NE(message_of("hosts: [{devices: [{type: t4, memory: 16GB}]}]").find("GiB"),
            std::string::npos);
}

TEST(ClusterFileTest, ReadsFiguresFoundOnADevice) {
  const Topology t = parse_cluster(
      "devices: {mine: {base: a100, efficiency: {matmul: 0.7, memory: 0.8}}}\n"
      "hosts: [{devices: [{count: 2, type: mine}]}]",
      "c.yaml");
  EXPECT_EQ(t.types[0].efficiency,
            (std::map<std::string, double>{{"matmul", 0.7}, {"memory", 0.8}}));
  EXPECT_NE(message_of("devices: {mine: {base: a100, efficiency: {matmull: 0.7}}}\nhosts: "
                       "[{devices: [{type: mine}]}]")
                .find("did you mean 'matmul'"),
            std::string::npos);
  EXPECT_NE(message_of("devices: {mine: {base: a100, efficiency: {matmul: -1}}}\nhosts: "
                       "[{devices: [{type: mine}]}]")
                .find("above zero"),
            std::string::npos);
}

TEST(PresetTest, CountsHosts) {
  const Topology t = make_preset("dgx-a100:128");
  EXPECT_EQ(t.num_devices(), 1024);
  EXPECT_TRUE(t.is_uniform());
  EXPECT_EQ(t.hosts.size(), 128u);
  EXPECT_EQ(make_preset("rtx-4090:2").num_devices(), 2);
  EXPECT_EQ(make_preset("v100-sxm2-16gb").num_devices(), 8);
  EXPECT_EQ(make_preset("cpu:4").num_devices(), 4);
  EXPECT_EQ(make_preset("cpu:4").hosts.size(), 1u);
  EXPECT_THROW(make_preset("dgx-a100:0"), Error);
  EXPECT_THROW(make_preset("dgx-a100:x"), Error);
  EXPECT_THROW(make_preset("no-such-machine"), Error);
  for (const std::string& name : preset_names()) {
    EXPECT_GE(make_preset(name).num_devices(), 1) << name;
  }
}

TEST(DeviceCatalogueTest, NamesMatchHoweverWritten) {
  const std::pair<const char*, const char*> kRows[] = {
      {"a100-80gb-sxm", "A100-SXM4-80GB"},
      {"A100", "A100-SXM4-80GB"},
      {"A100-SXM4 (memory size not stated)", "A100-SXM4-80GB"},
      {"A100-SXM4-40GB", "A100-SXM4-40GB"},
      {"A100-PCIe", "A100-PCIe-80GB"},
      {"H100", "H100-SXM5-80GB"},
      {"H100-96GB HBM2e 500W (2.4 TB/s)", "H100-96GB HBM2e (Grand Teton, 500 W)"},
      {"V100-SXM2-32GB", "V100-SXM2-32GB"},
      {"V100-PCIe-16GB", "V100-PCIe-16GB"},
      {"NVIDIA GeForce RTX 4090", "RTX 4090"},
      {"rtx-2080ti", "RTX 2080 Ti"},
      {"Tesla T4", "T4"},
      {"GH-96", "GH200-96GB"},
      {"B200-SXM", "B200-SXM"},
      {"L40S", "L40S"},
  };
  for (const auto& [written, meant] : kRows) {
    const auto found = match_device(written);
    ASSERT_TRUE(found.has_value()) << written;
    EXPECT_EQ(found->device.name, meant) << written;
  }
  EXPECT_FALSE(match_device("tpu-v4").has_value());
  EXPECT_FALSE(match_device("").has_value());
}

// What a run refuses for want of hardware is not planned either; what every GPU can do is.
TEST(DeviceTypeTest, HasTheRatesOfItsHardwareAlone) {
  const auto device = [](const char* name) { return match_device(name).value().device; };
  EXPECT_DOUBLE_EQ(device("a100-80gb-sxm").peak_flops("tf32"), 156e12);
  EXPECT_DOUBLE_EQ(device("a100-80gb-sxm").peak_flops("fp64"), 19.5e12);  // by Tensor Cores
  EXPECT_DOUBLE_EQ(device("V100-SXM2-16GB").peak_flops("fp64"), 7.8e12);
  for (const CatalogueEntry& entry : device_catalogue()) {
    EXPECT_GT(entry.device.peak_flops("fp64"), 0) << entry.device.name;
    EXPECT_LE(entry.device.peak_flops("fp64"), entry.device.peak_flops("fp32"));
  }
  for (const char* name : {"V100-SXM2-16GB", "Titan RTX", "RTX 2080 Ti", "T4"}) {
    try {
      device(name).peak_flops("tf32");
      ADD_FAILURE() << name << " has TF32";
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("has no rate for precision tf32"), std::string::npos);
    }
  }
}

// A rank's share of the network is its own cards, and what concurrent groups leave of the host's.
TEST(GroupLinksTest, SharesTheNetworkBetweenGroups) {
  const Topology t = make_preset("dgx-a100:4");
  std::vector<int> strided;  // one rank per host, as a data-parallel group under tensor degree 8
  std::vector<int> whole;
  for (int host = 0; host < 4; ++host) {
    strided.push_back(host * 8);
    for (int i = 0; i < 8; ++i) {
      whole.push_back(host * 8 + i);
    }
  }
  const GroupLinks one = group_links(t, strided, 8);
  EXPECT_EQ(one.num_hosts, 4);
  EXPECT_EQ(one.ranks_per_host, 1);
  EXPECT_DOUBLE_EQ(one.host_bandwidth, 25e9);
  EXPECT_DOUBLE_EQ(group_links(t, strided, 1).host_bandwidth, 25e9);
  const GroupLinks all = group_links(t, whole, 1);
  EXPECT_EQ(all.ranks_per_host, 8);
  EXPECT_DOUBLE_EQ(all.host_bandwidth, 200e9);
}

}  // namespace
}  // namespace trainrt
