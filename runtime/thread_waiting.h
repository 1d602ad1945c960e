// How the threads of a kernel wait for each other.
#pragma once

namespace trainrt {

// OpenMP's runtime lets a thread that waits spin for some milliseconds before it sleeps. Alone on
// the machine that gains nothing over some microseconds; beside other programs (or a data loader)
// it takes the core from the very thread it waits for: a small CNN trained 40 times slower on two
// cores that ten compilers shared. The runtime reads its setting before main(), so the program
// starts itself once more with GOMP_SPINCOUNT set. Does nothing where the environment says how to
// wait, and goes on as it is where the program cannot be started again.
void limit_spinning(char** argv);

}  // namespace trainrt
