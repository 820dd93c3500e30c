#include "fallback/cost.h"

#include "report/log.h"

#include <cstdio>

static std::string mebibytes(uint64_t bytes) {
    char text[32];
    snprintf(text, sizeof(text), bytes < (1 << 20) ? "%.3f MiB" : "%.1f MiB", (double) bytes / (1 << 20));
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
        NEURON_WARN("the CPU computes %s, which moves %s to the host or back each time\n"
                    "to record what the program computes, for kernelgen model: GGML_NEURON_RECORD=FILE\n",
                    name.c_str(), mebibytes(bytes).c_str());
    }
}

void neuron_fallback_cost::reads::add(const ggml_tensor * tensor, uint64_t bytes) {
    total += bytes;
    if (bytes > most) {
        most = bytes;
        name = tensor->name;
    }
}

std::string neuron_fallback_cost::reads::summary(const char * what) const {
    return mebibytes(total) + " of " + what + " were read from the device, at most " + mebibytes(most) + ", of '" +
           name + "'";
}

void neuron_fallback_cost::add_weight(const ggml_tensor * tensor, uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    weights.add(tensor, bytes);
    if (weights.total >= LARGE && !weight_said) {
        weight_said = true;
        NEURON_LOG("weights are read from the device, %s so far, for ops that have no kernel\n"
                   "weights that are read again stay in host memory (GGML_NEURON_FALLBACK_MEMORY)\n",
                   mebibytes(weights.total).c_str());
    }
}

void neuron_fallback_cost::add_read(const ggml_tensor * tensor, uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    others.add(tensor, bytes);
    if (bytes >= LARGE && !other_said) {
        other_said = true;
        NEURON_LOG("%s of '%s' are read from the device, as if an op had no kernel\n", mebibytes(bytes).c_str(),
                   tensor->name);
    }
}

uint64_t neuron_fallback_cost::bytes() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return total + weights.total + others.total;
}

std::string neuron_fallback_cost::summary() const {
    const std::lock_guard<std::mutex> lock(mutex);
    std::string                       text;
    if (total) {
        text = "nodes on the CPU moved " + mebibytes(total) + " to the host or back, at most " + mebibytes(most) +
               ", for " + name;
    }
    if (weights.total) {
        text += (text.empty() ? "" : "; ") + weights.summary("weights");
    }
    if (others.total) {
        text += (text.empty() ? "" : "; ") + others.summary("other tensors");
    }
    return text;
}
