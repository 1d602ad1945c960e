// The dry-run report (CONTRACT section 2): as JSON, as one screen of text, and as a web page.
#pragma once

#include <string>

#include "planner/error_bands.h"
#include "planner/planner.h"

namespace trainrt {

struct ReportContext {
  std::string model_name;
  double seconds = 0;  // wall time of the whole command
};

std::string report_json(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context);
std::string report_text(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context);
// Self-contained: no script, font or picture is fetched.
std::string report_html(const PlanRequest& request,
                        const PlanResult& result,
                        const ReportContext& context);

// The figures of a plan that reports derive from step time.
struct PlanFigures {
  double samples_per_second = 0;
  double tokens_per_second = 0;
  double model_flops = 0;  // of one step
  double flops_per_second_per_device = 0;
  double mfu = 0;
  double exposed_communication_seconds = 0;
};
PlanFigures plan_figures(const PlanRequest& request, const PlanResult& result, const Candidate& c);

// How much of the step a picture with about `most_cells` cells a row shows: its beginning, with the
// filling of the pipeline and the steady state after it.
double shown_seconds(const Timeline& timeline, size_t most_cells);

// How far off a prediction like this one has been.
ErrorBand error_band_of(const PlanRequest& request, const PlanResult& result);

}  // namespace trainrt
