#include "graph/label_place.h"

#include <algorithm>
#include <vector>

#include "graph/base/log.h"
#include "graph/loss.h"

namespace trainrt {

SampleShapeAt split_samples(const Shape& shape, const SamplePlace& place, int64_t batch) {
  const size_t axis = static_cast<size_t>(place.axis);
  if (axis >= shape.size() || batch <= 0 || shape[axis] % batch != 0) {
    return {shape, place.axis};
  }
  // Of the two parts one follows the size at hand, which --max-tokens changes.
  const int64_t rows = shape[axis] / batch;
  const int64_t outer = place.outer > 1 && place.inner == 1 ? rows : place.outer;
  const int64_t inner = rows / std::max<int64_t>(1, outer);
  SampleShapeAt at{Shape(shape.begin(), shape.begin() + place.axis), place.axis};
  if (outer > 1) {
    at.shape.push_back(outer);
    ++at.batch_axis;
  }
  at.shape.push_back(batch);
  if (inner > 1) {
    at.shape.push_back(inner);
  }
  at.shape.insert(at.shape.end(), shape.begin() + place.axis + 1, shape.end());
  return at;
}

Shape sample_of(SampleShapeAt at) {
  if (at.batch_axis < static_cast<int>(at.shape.size())) {
    at.shape.erase(at.shape.begin() + at.batch_axis);
  }
  return at.shape;
}

namespace {

bool all_inputs_batch_first(const Graph& graph) {
  const std::vector<ValueId> inputs = graph.values_of_kind(ValueKind::kInput);
  return std::all_of(
      inputs.begin(), inputs.end(), [&](ValueId id) { return graph.value(id).batch_axis <= 0; });
}

std::optional<SamplePlace> followed_place(const Graph& graph, const std::string& output) {
  const SampleCourse course = follow_samples(graph);
  const std::optional<ValueId> id = graph.find_value(output);
  return id && !course.places.empty() ? course.places[static_cast<size_t>(*id)] : std::nullopt;
}

// The place that the output's shapes at `batch` and one more samples tell of; nothing when no axis
// follows their number, or several do.
std::optional<SamplePlace> place_of_sizes(const Graph& graph,
                                          const Graph& more,
                                          const std::string& output) {
  const std::optional<ValueId> id = graph.find_value(output), other = more.find_value(output);
  const int64_t batch = micro_batch_size(graph);
  if (!id || !other) {
    return std::nullopt;
  }
  const Shape& shape = graph.value(*id).type.shape;
  const Shape& now = more.value(*other).type.shape;
  std::optional<SamplePlace> place;
  for (size_t d = 0; d < std::min(shape.size(), now.size()); ++d) {
    if (shape[d] == now[d]) {
      continue;
    }
    if (place || shape[d] % batch != 0) {
      return std::nullopt;
    }
    place = SamplePlace{static_cast<int>(d), 1, shape[d] / batch};
  }
  return place;
}

}  // namespace

SamplePlace find_sample_place(const Graph& forward,
                              const Value& output,
                              const GraphAtBatch& at_batch) {
  const int64_t batch = micro_batch_size(forward);
  // One sample may be any axis of size 1.
  const std::optional<Graph> two = batch == 1 && at_batch ? at_batch(2) : std::nullopt;
  const Graph& graph = two ? *two : forward;
  if (const std::optional<SamplePlace> place = followed_place(graph, output.name)) {
    return *place;
  }
  const int64_t size = micro_batch_size(graph);
  const std::optional<Graph> more = at_batch && size > 1 ? at_batch(size + 1) : std::nullopt;
  const std::optional<SamplePlace> place =
      more ? place_of_sizes(graph, *more, output.name) : std::nullopt;
  if (!place) {
    return {};
  }
  if (place->inner > 1) {
    const std::string found = concat("the samples of output '",
                                     output.name,
                                     "' ",
                                     shape_string(output.type.shape),
                                     " lie within its axis ",
                                     place->axis,
                                     ", ",
                                     place->inner,
                                     " rows each, and cannot be followed there: ");
    TRAINRT_REQUIRE(all_inputs_batch_first(graph) && place->axis == 0,
                    kInvalidArgument,
                    found,
                    "which of its rows belong to which sample of the labels is open; export the "
                    "model with the samples on an axis of their own in the output");
    log_warning(found, "the rows of a sample are taken to follow one another, as in its inputs");
  }
  return *place;
}

namespace {

// Of the labels to an output without its classes.
enum class Fit { kNone, kCount, kShape };

struct ClassAxes {
  int first = 0, end = 0;
  Fit fits_first = Fit::kNone, fits_end = Fit::kNone;
};

// The axes of a sample that its classes may lie along: [classes, ...] or [..., classes].
ClassAxes class_axes(const Shape& output, const LossSpec& spec) {
  const int last = static_cast<int>(output.size()) - 1;
  const SamplePlace& place = spec.place;
  ClassAxes axes;
  axes.first = place.axis == 0 ? 1 : 0;
  axes.end = place.axis == last ? last - 1 : last;
  if (last < 1 || spec.next_token || axes.first == axes.end) {
    return axes;
  }
  const Shape labels = sample_of({spec.labels_shape, spec.labels_batch_axis});
  const size_t batch_at = static_cast<size_t>(spec.labels_batch_axis);
  const int64_t batch =
      batch_at < spec.labels_shape.size() ? spec.labels_shape[batch_at] : int64_t{1};
  const auto fits = [&](int axis) {
    const ItemsShape items = without_classes(output, place, axis);
    const Shape item = sample_of(split_samples(items.shape, items.place, batch));
    return item == labels                               ? Fit::kShape
           : num_elements(item) == num_elements(labels) ? Fit::kCount
                                                        : Fit::kNone;
  };
  axes.fits_first = fits(axes.first);
  axes.fits_end = fits(axes.end);
  return axes;
}

}  // namespace

int class_axis(const Shape& output, const LossSpec& spec) {
  const int last = static_cast<int>(output.size()) - 1;
  if (last < 1) {
    return -1;
  }
  const ClassAxes axes = class_axes(output, spec);
  if (spec.next_token || axes.first == axes.end) {
    return axes.end;
  }
  if (axes.fits_first == Fit::kShape || axes.fits_end == Fit::kShape) {
    // [batch, seq, classes] where the sizes leave it open; with more dims [batch, classes, ...].
    const bool open = axes.fits_first == axes.fits_end;
    return axes.fits_end == Fit::kShape && (!open || last == 2) ? axes.end : axes.first;
  }
  return axes.fits_end == Fit::kCount && axes.fits_first == Fit::kNone ? axes.end : axes.first;
}

bool class_axis_is_open(const Shape& output, const LossSpec& spec) {
  const ClassAxes axes = class_axes(output, spec);
  return axes.fits_first != Fit::kNone && axes.fits_first == axes.fits_end;
}

ItemsShape without_classes(const Shape& output, const SamplePlace& place, int class_axis) {
  ItemsShape items{output, place};
  items.shape.erase(items.shape.begin() + class_axis);
  items.place.axis -= class_axis < place.axis ? 1 : 0;
  return items;
}

}  // namespace trainrt
