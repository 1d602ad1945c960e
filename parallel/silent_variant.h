// A micro-batch without samples. Where data ranks communicate within a micro-batch (ZeRO 2 and 3,
// synchronised BatchNorm), a rank with fewer micro-batches than another still takes part in the
// rest: with zeros for what it would have computed.
#pragma once

#include "parallel/program.h"

namespace trainrt {

// The collectives of `full` over the data axis, in their order and phases, what they feed that
// outlives the micro-batch (accumulators, running statistics), and zeros for everything else they
// read.
ProgramVariant silent_variant(const ProgramVariant& full);

// What a rank without samples runs once per step: the reduce and update phases of `full`, with
// zeros for what micro-batches would have left; `lockstep`: but for what its silent micro-batches
// leave.
ProgramVariant idle_variant(const ProgramVariant& full, bool lockstep);

// What every rank runs once per step when data ranks have micro-batches of different sizes: the
// reduce and update phases of `full` over what any micro-batches have accumulated.
ProgramVariant update_variant(const ProgramVariant& full);

}  // namespace trainrt
