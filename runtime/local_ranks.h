// Ranks as processes of this host, started and watched by the program itself.
#pragma once

#include "runtime/launcher.h"

namespace trainrt {

// `num_ranks` ranks that are a whole job.
Launch local_launch(int num_ranks);

// Starts this program anew, with the same arguments, as the launch's ranks and waits for them.
// Signals that ask to stop are passed on. When a rank has failed, those that are stopped, or do not
// end by themselves within some seconds, are killed. Returns the exit code of the
// rank that failed first by itself, rather than of one that reports another's end.
int run_local_ranks(const Launch& launch);

}  // namespace trainrt
