// What the header of a NEFF says: whether the simulator can run it. The payload is read, and checked, by the helper.

#pragma once

#include "../../nrt/nrt_api.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace simulator {

// Returns NRT_SUCCESS for a simulated NEFF, NRT_UNSUPPORTED_NEFF_VERSION for one that is for a device or of a format unknown here,
// and NRT_INVALID for anything else; then `why` says more.
NRT_STATUS check_neff_header(const void * data, size_t size, std::string & why);

// Returns how many physical cores a logical one has that the NEFF was compiled for (--lnc). Its header is good.
uint32_t lnc_of_neff(const void * data);

}  // namespace simulator
