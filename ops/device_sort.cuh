// Sorts positions by the places that they name, on a CUDA device, so that what several positions
// add to one place is added by one thread in one order.
#pragma once

#include "ops/device_sort.h"
#include "ops/launch.cuh"

namespace trainrt::device_sort {

struct Sorted {
  const uint32_t* places;     // [n], ascending
  const uint32_t* positions;  // [n], ascending within a place
  int64_t n;

  TRAINRT_HOST_DEVICE bool begins(int64_t k) const { return k == 0 || places[k - 1] != places[k]; }
  TRAINRT_HOST_DEVICE bool ends(int64_t k) const {
    return k + 1 == n || places[k + 1] != places[k];
  }
};

// The pieces of a workspace of at least bytes(n).
struct Buffers {
  uint32_t *places[2], *positions[2];
  std::byte* scratch;
  int64_t n;

  // Refuses more than kMost positions or places.
  Buffers(const KernelContext& context, int64_t num_positions, int64_t num_places);
};

// Sorts places[0] and positions[0]; the places are below `num_places`.
Sorted sort(KernelContext& context, const Buffers& buffers, int64_t num_places);

template <typename PlaceOf>
struct NumberPlaces {
  PlaceOf place_of;
  uint32_t *places, *positions;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    places[i] = static_cast<uint32_t>(place_of(i));
    positions[i] = static_cast<uint32_t>(i);
  }
};

// place_of(i), i in [0, n), is a place in [0, num_places), or num_places where i names none.
template <typename PlaceOf>
Sorted sort_by_place(KernelContext& context,
                     int64_t n,
                     int64_t num_places,
                     const PlaceOf& place_of) {
  const Buffers buffers(context, n, num_places);
  launch(context, n, NumberPlaces<PlaceOf>{place_of, buffers.places[0], buffers.positions[0]});
  return sort(context, buffers, num_places + 1);
}

}  // namespace trainrt::device_sort
