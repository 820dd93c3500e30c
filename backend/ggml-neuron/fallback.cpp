#include "fallback.h"

#include "log.h"

#include <cstdio>

static std::string mebibytes(uint64_t bytes) {
    char text[32];
    snprintf(text, sizeof(text), "%.1f MiB", (double) bytes / (1 << 20));
    return text;
}

void neuron_fallback_cost::add(const ggml_tensor * node, uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    total += bytes;
    if (bytes > most) {
        most = bytes;
        name = std::string(ggml_op_desc(node)) + " '" + node->name + "'";
    }
    if (bytes >= LARGE && !said) {
        said = true;
        NEURON_WARN(
            "the CPU computes %s, which moves %s to the host or back each time: a kernel for it is worth building "
            "(GGML_NEURON_RECORD); said once\n",
            name.c_str(), mebibytes(bytes).c_str());
    }
}

uint64_t neuron_fallback_cost::bytes() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return total;
}

std::string neuron_fallback_cost::summary() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return "nodes on the CPU moved " + mebibytes(total) + " to the host or back, at most " + mebibytes(most) +
           ", for " + name;
}
