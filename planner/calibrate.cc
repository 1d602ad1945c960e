// Coordinate descent on the mean error: one constant after the other is moved by steps that shrink
// from round to round, and stays where hardware can be. Few constants and few rows, so no gradient
// is needed, and a constant that the rows do not depend on keeps its value.
#include "planner/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <set>

#include "graph/base/error.h"

namespace trainrt {

namespace {

using Rows = std::vector<const MeasuredRow*>;
using Efficiency = std::map<std::string, double>;

constexpr size_t kLeastRows = 4;
constexpr const char* kFitted[] = {
    "matmul", "small_tile_loss", "prologue_k", "attention", "memory", "overlap_slowdown"};

class Fitter {
 public:
  Fitter(const Engine& engine, const ProfileBuilder& other_models, const DeviceType& device)
      : engine_(engine), other_models_(other_models), start_(constants_for(device)) {}

  double error(const Rows& rows, const Efficiency& efficiency) const {
    double sum = 0;
    for (const MeasuredRow* row : rows) {
      sum += std::fabs(predict_row(*row, engine_, other_models_, efficiency).error());
    }
    return sum / static_cast<double>(rows.size());
  }

  Efficiency fit(const Rows& rows) const {
    Efficiency best;
    double least = error(rows, best);
    for (const double step : {0.2, 0.1, 0.05, 0.02}) {
      for (const char* name : kFitted) {
        const NamedConstant& constant = find(name);
        const auto known = best.find(name);
        const double value = known != best.end() ? known->second : start_.*constant.field;
        for (const double factor : {1 - step, 1 + step}) {
          Efficiency tried = best;
          tried[name] = std::clamp(value * factor, constant.low, constant.high);
          const double own = error(rows, tried);
          if (own < least) {
            least = own;
            best = tried;
          }
        }
      }
    }
    return best;
  }

 private:
  static const NamedConstant& find(const std::string& name) {
    const std::vector<NamedConstant>& all = named_constants();
    const auto found = std::find_if(
        all.begin(), all.end(), [&](const NamedConstant& c) { return c.name == name; });
    TRAINRT_CHECK(found != all.end(), name);
    return *found;
  }

  const Engine& engine_;
  const ProfileBuilder& other_models_;
  DeviceConstants start_;
};

struct Split {
  const char* by;
  std::function<int64_t(const MeasuredRow&)> size;
};

const std::vector<Split>& splits() {
  static const std::vector<Split> kSplits = {
      {"depth", [](const MeasuredRow& row) { return row.shape.layers; }},
      {"width", [](const MeasuredRow& row) { return row.shape.hidden; }},
      {"devices", [](const MeasuredRow& row) { return int64_t{row.num_devices}; }},
  };
  return kSplits;
}

void hold_out(const Split& split, const Rows& rows, const Fitter& fitter, Calibration* result) {
  std::set<int64_t> sizes;
  for (const MeasuredRow* row : rows) {
    sizes.insert(split.size(*row));
  }
  const int64_t border = *std::next(sizes.begin(), static_cast<int64_t>(sizes.size() / 2));
  Rows seen, unseen;
  for (const MeasuredRow* row : rows) {
    (split.size(*row) < border ? seen : unseen).push_back(row);
  }
  if (seen.size() < kLeastRows || unseen.size() < kLeastRows) {
    return;
  }
  result->held_out.push_back({split.by,
                              static_cast<int>(unseen.size()),
                              fitter.error(unseen, {}),
                              fitter.error(unseen, fitter.fit(seen))});
}

std::string number(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string calibrated_name(const Calibration& calibration) {
  std::string name;
  for (const char c : calibration.device) {
    const auto byte = static_cast<unsigned char>(c);
    name += std::isalnum(byte) != 0 ? static_cast<char>(std::tolower(byte)) : '-';
  }
  return name + "-calibrated";
}

}  // namespace

Calibration calibrate(const std::vector<MeasuredRow>& rows,
                      const Engine& engine,
                      const ProfileBuilder& other_models) {
  TRAINRT_REQUIRE(rows.size() >= kLeastRows,
                  kInvalidArgument,
                  "--calibrate needs at least ",
                  kLeastRows,
                  " usable rows, found ",
                  rows.size());
  const Topology topology = topology_of_row(rows[0]);
  Calibration result;
  result.device = topology.types[0].name;
  result.devices_per_host = static_cast<int>(topology.hosts[0].devices.size());
  Rows all;
  for (const MeasuredRow& row : rows) {
    const Topology own = topology_of_row(row);
    TRAINRT_REQUIRE(own.types.size() == 1 && own.types[0].name == result.device,
                    kInvalidArgument,
                    "--calibrate fits one kind of device: row ",
                    rows[0].id,
                    " is of ",
                    result.device,
                    ", row ",
                    row.id,
                    " of '",
                    row.device,
                    "'; give the tables of one device alone");
    result.devices_per_host =
        std::max(result.devices_per_host, static_cast<int>(own.hosts[0].devices.size()));
    all.push_back(&row);
  }
  const Fitter fitter(engine, other_models, topology.types[0]);
  for (const Split& split : splits()) {
    hold_out(split, all, fitter, &result);
  }
  result.rows = static_cast<int>(rows.size());
  result.error_before = fitter.error(all, {});
  result.efficiency = fitter.fit(all);
  result.error = fitter.error(all, result.efficiency);
  return result;
}

std::string calibrated_cluster(const Calibration& calibration) {
  const std::string name = calibrated_name(calibration);
  std::string figures;
  for (const auto& [figure, value] : calibration.efficiency) {
    figures += concat(figures.empty() ? "" : ", ", figure, ": ", number(value, "%.4g"));
  }
  std::string text =
      "# Fitted by `trainrt validate --calibrate`; set count to the hosts you have.\n";
  std::string report = calibration_text(calibration);
  for (size_t begin = 0; begin < report.size();) {
    const size_t end = report.find('\n', begin);
    text += "# " + report.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  return concat(text,
                "devices:\n  ",
                name,
                ":\n    base: ",
                calibration.device,
                "\n    efficiency: {",
                figures,
                "}\nhosts:\n  - {count: 1, devices: [{count: ",
                calibration.devices_per_host,
                ", type: ",
                name,
                "}]}\n");
}

std::string calibration_text(const Calibration& calibration) {
  std::string text = concat(calibration.device,
                            ": ",
                            calibration.rows,
                            " rows, mean error ",
                            number(100 * calibration.error_before, "%.1f"),
                            " % before and ",
                            number(100 * calibration.error, "%.1f"),
                            " % after the fit\n");
  for (const HeldOut& held : calibration.held_out) {
    text += concat("held out by ",
                   held.by,
                   ": ",
                   held.rows,
                   " rows, ",
                   number(100 * held.error_before, "%.1f"),
                   " % before, ",
                   number(100 * held.error, "%.1f"),
                   " % fitted to the others\n");
  }
  return text;
}

}  // namespace trainrt
