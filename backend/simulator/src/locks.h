// Locks of a simulated instance's cores.

#pragma once

#include "fds.h"

#include <cstdint>
#include <string>
#include <vector>

namespace simulator {

// Takes cores for this process, until the descriptors in `out` are closed: of the processes that name the same folder, one at a
// time has a core. Where others have them, it takes as many others that follow one another, of the first `any_of`; none when that is 0.
// `used`: whether another process had one of them before. Returns false, with the reason in `error`, when other processes have too many or the folder can't be used.
bool lock_cores(const std::string &      folder,
                uint32_t                 any_of,
                std::vector<uint32_t> &  cores,
                std::vector<unique_fd> & out,
                bool &                   used,
                std::string &            error);

}  // namespace simulator
