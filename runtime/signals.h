// SIGINT and SIGTERM as a question that the training loop asks between steps.
#pragma once

namespace trainrt {

// The first signal is remembered; a second one ends the process at once.
void catch_stop_signals();

// The signal that asked to stop, or 0.
int stop_signal();

}  // namespace trainrt
