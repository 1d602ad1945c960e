// `trainrt profile`: measures this machine's devices into a file that --cluster takes.
#include "runtime/commands/command.h"
#include "runtime/plan_choice.h"
#include "runtime/profiler.h"

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
          const MachineProfile profile = profile_machine(rank_devices(options, {}));
          write_result(profile_yaml(profile, "this-cpu"), options);
          return 0;
        },
}};

}  // namespace

}  // namespace trainrt
