// How a pack is refused: an exception inside the library, turned into a status and a message at the C API's edge.

#pragma once

#include "neuron_kernels.h"

#include <string>
#include <string_view>

namespace nk {

struct error {
    neuron_kernels_status status;
    std::string           message;
};

// Throws an error with a message as printf formats it.
[[noreturn]] void fail(neuron_kernels_status status, const char * format, ...) __attribute__((format(printf, 2, 3)));

// Returns text from a file fit for a message: quoted, cut when long, and without bytes that a terminal would act on.
std::string quoted(std::string_view text);

}  // namespace nk
