// SIGINT and SIGTERM: at once while a run is prepared, between two steps while it trains.
#pragma once

namespace trainrt {

// From now on the first signal ends the process with 128 + its number, as nothing is half written.
// A closed stdout becomes an I/O error.
void catch_stop_signals();

// From now on the first signal is remembered, for stop_signal(); a second one ends the process.
void defer_stop_signals();

// The signal that asked to stop, or 0.
int stop_signal();

}  // namespace trainrt
