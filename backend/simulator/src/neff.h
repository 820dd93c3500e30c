// Checks the header of a NEFF: whether the simulator can run it. The helper reads and checks the payload.

#pragma once

#include "../../nrt/nrt_api.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace simulator {

// Returns NRT_SUCCESS for a simulated NEFF, NRT_UNSUPPORTED_NEFF_VERSION for a device's NEFF or an unknown format, and
// NRT_INVALID for other data. `why` gets the details.
NRT_STATUS check_neff_header(const void * data, size_t size, std::string & why);

// Returns the number of physical cores per logical core for which the NEFF was compiled (--lnc). Requires a valid header.
uint32_t lnc_of_neff(const void * data);

}  // namespace simulator
