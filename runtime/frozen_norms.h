// BatchNormalization in inference form, as in a model exported for evaluation: it is trained with
// the statistics that the file holds, which are never brought up to date.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

// The nodes of `forward` that normalize with fixed statistics what training changes: their scale or
// bias is trained, or something before them. Those of a frozen part are meant to stay.
std::vector<std::string> frozen_norms(const Graph& forward);

// "3 BatchNormalization nodes in inference form ('a', 'b', ...)", and what it means; for one node
// or more.
std::string frozen_norms_text(const std::vector<std::string>& names);

}  // namespace trainrt
