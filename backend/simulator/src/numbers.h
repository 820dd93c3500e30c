// Detects NaNs in results.

#pragma once

#include "../../nrt/nrt_api.h"

#include <cstddef>
#include <cstdint>

namespace simulator {

// Returns whether a tensor has a NaN. `size` is in bytes. Types that are not floats have none.
bool holds_nan(nrt_dtype_t type, const uint8_t * data, size_t size);

// Returns the bytes of an element; 1 for an unknown type.
size_t bytes_of(nrt_dtype_t type);

}  // namespace simulator
