#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace nk {

void fail(neuron_kernels_status status, const char * format, ...) {
    char    buffer[NEURON_KERNELS_MESSAGE_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    throw error{ status, buffer };
}

std::string quoted(std::string_view text) {
    constexpr size_t MAX_SHOWN = 80;

    std::string out = "'";
    for (char c : text.substr(0, MAX_SHOWN)) {
        out += c >= ' ' && c <= '~' ? c : '?';
    }
    return out + (text.size() > MAX_SHOWN ? "...'" : "'");
}

}  // namespace nk
