// Bytes of each pipeline rank, in closed form from the profile: what the search prunes by. The
// final figures come from the programs' memory plan.
#pragma once

#include "planner/step_cost.h"

namespace trainrt {

// Most micro-batches in flight on the rank's virtual stages together, in units of one virtual
// stage.
int stages_in_flight(const Layout& layout, int stage, int num_micro_batches);

}  // namespace trainrt
