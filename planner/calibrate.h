// Fits the named constants of a device (planner/cost_model.h) to measured rows of a user's own, and
// says how good the fit is on rows it has not seen.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "planner/validation.h"

namespace trainrt {

// Rows in the upper half of a size, predicted with what the lower half says. Neighbouring layouts
// leak into each other, so rows are never split at random.
struct HeldOut {
  std::string by;           // "depth", "width", "devices"
  int rows = 0;             // held out
  double error_before = 0;  // mean |predicted / measured - 1| of them, unfitted
  double error = 0;         // ... fitted to the others
};

struct Calibration {
  std::string device;  // the catalogue's name
  int devices_per_host = 1;
  std::map<std::string, double> efficiency;  // by efficiency_names(), within named_constants()
  int rows = 0;
  double error_before = 0;
  double error = 0;  // on the rows of the fit
  std::vector<HeldOut> held_out;
};

// Throws kInvalidArgument when the rows are of several devices, or fewer than four.
Calibration calibrate(const std::vector<MeasuredRow>& rows,
                      const Engine& engine,
                      const ProfileBuilder& other_models);

// A cluster file (CONTRACT section 3) of one host with the fitted device.
std::string calibrated_cluster(const Calibration& calibration);

// What was fitted and how well, for people.
std::string calibration_text(const Calibration& calibration);

}  // namespace trainrt
