// `trainrt profile`: measures this machine's devices into a file that --cluster takes.
#include "runtime/commands/command.h"
#include "runtime/profiler.h"
#include "runtime/rank_devices.h"
#include "runtime/ranks.h"

namespace trainrt {

namespace {

const RegisterCommand kProfile{{
    .name = "profile",
    .arguments = "",
    .summary = "measure this machine's devices into a cluster file",
    .groups = kDeviceOptions | kOutputOptions,
    .min_arguments = 0,
    .max_arguments = 0,
    .run =
        [](const Options& options) {
          return with_ranks(options, [&](Ranks& ranks) {
            const std::vector<DeviceOptions> devices =
                run_devices(options, {ranks.hosts(), ranks.only_rank().value_or(0)});
            ranks.run(static_cast<int>(devices.size()), [&](int rank, Communicator* world) {
              const MachineProfile profile = profile_machine(
                  devices[static_cast<size_t>(rank)], world, options.profile_seconds);
              if (rank == 0) {
                write_result(profile_yaml(profile, "this-cpu"), options);
              }
            });
            return 0;
          });
        },
    .starts_ranks = true,
}};

}  // namespace

}  // namespace trainrt
