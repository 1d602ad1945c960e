// Labels lie as the output of a loss does: its samples may be along any axis, or within an axis
// that the model has merged of samples and something else.
#pragma once

#include "graph/training_graph.h"

namespace trainrt {

// A shape whose samples have an axis of their own.
struct SampleShapeAt {
  Shape shape;
  int batch_axis = 0;
};
// `shape`, whose samples lie at `place`, with the axis that holds them taken apart; parts of size 1
// are left out.
SampleShapeAt split_samples(const Shape& shape, const SamplePlace& place, int64_t batch);

// `shape` without the axis of its samples.
Shape sample_of(SampleShapeAt at);

// Where the samples of an output lie. They are followed through the graph; where that ends, the
// output's shapes at two numbers of samples tell. Throws kInvalidArgument when these leave the
// order open. `at_batch` may be null.
SamplePlace find_sample_place(const Graph& forward,
                              const Value& output,
                              const GraphAtBatch& at_batch);

// Of an output whose samples lie at spec.place: the axis of the classes. ONNX puts them on axis 1
// after the samples, language models last; the labels' shape tells. -1: the output has no such
// axis.
int class_axis(const Shape& output, const LossSpec& spec);

// Whether the labels would fit as well with the classes along another axis than class_axis().
bool class_axis_is_open(const Shape& output, const LossSpec& spec);

// What is left of `output` and of `place` in it without the axis of the classes: one item each.
struct ItemsShape {
  Shape shape;
  SamplePlace place;
};
ItemsShape without_classes(const Shape& output, const SamplePlace& place, int class_axis);

}  // namespace trainrt
