// What the environment asks for.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simulator {

struct config {
    uint32_t              total = 1;         // cores of the simulated instance
    std::vector<uint32_t> visible;           // those of this process, by their number in the instance
    size_t                memory       = 0;  // bytes per core
    size_t                host_memory  = 0;  // bytes for NEFFs and host tensors
    double                exec_timeout = 0;  // seconds; 0: none

    // Returns false, with the reason in `error`, when a variable's value is none that it can have.
    static bool read(config & out, std::string & error);
};

}  // namespace simulator
