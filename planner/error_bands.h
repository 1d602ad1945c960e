// How far predictions were off on published measurements, by kind of model and of machine. The
// table is planner/data/error_bands.csv, which `trainrt validate --bands` writes.
#pragma once

#include <string>
#include <vector>

#include "planner/validation.h"

namespace trainrt {

// Of measured / predicted - 1, the middle 80 % of rows.
struct ErrorBand {
  double low = 0, high = 0;
  std::string from;
};

// The table of these results: kind, machine (an architecture, or "mixed"), hosts ("one", "many"),
// rows, low, high, from (the files). Groups of fewer than three rows are left out.
std::string error_bands_csv(const std::vector<FileResult>& results);

// For a plan: of models and machines like it, or the widest where there are none.
ErrorBand error_band(const Topology& topology, bool sequence_model);

}  // namespace trainrt
