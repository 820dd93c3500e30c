#include "plan/fusion.h"

#include "report/environment.h"

neuron_fusion::neuron_fusion(const neuron_kernel_store & kernels) : enabled(neuron_switch("GGML_NEURON_FUSION", true)) {
    kernels.for_each_graph([this](const neuron_kernel & kernel) { launches[kernel.id()] = 0; });
}

void neuron_fusion::reset() {
    for (auto & entry : launches) {
        entry.second = 0;
    }
}

int neuron_fusion::get(const char ** ids, uint64_t * counts, int n) const {
    int i = 0;
    for (const auto & entry : launches) {
        if (i < n && ids) {
            ids[i] = entry.first.c_str();
        }
        if (i < n && counts) {
            counts[i] = entry.second;
        }
        i++;
    }
    return i;
}
