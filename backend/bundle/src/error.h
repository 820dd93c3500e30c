// Errors: an exception inside the library, which the C API turns into a status and a message.

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

// Returns text from a file in a form fit for a message: quoted, cut when long, and without control characters.
std::string quoted(std::string_view text);

}  // namespace nk
