// Locks of a simulated instance's cores.

#pragma once

#include "fds.h"

#include <cstdint>
#include <string>
#include <vector>

namespace simulator {

// Locks cores for this process until the descriptors in `out` are closed. Among processes that use the same folder, one
// process at a time has a core. If other processes have the cores and `any_of` is not 0, it takes the same number of
// consecutive cores among the first `any_of`. `used`: whether the last core's file existed, which means that a process
// had the core before. Returns false, with the reason in `error`, if too few cores are free or the folder cannot be
// used.
bool lock_cores(const std::string &      folder,
                uint32_t                 any_of,
                std::vector<uint32_t> &  cores,
                std::vector<unique_fd> & out,
                bool &                   used,
                std::string &            error);

}  // namespace simulator
