#include "counts.h"

#include "log.h"

#include <string>

neuron_counts g_counts;

neuron_counts::~neuron_counts() {
    const auto print = [](const char * where, const auto & counts) {
        uint64_t    total = 0;
        std::string ops;
        for (int op = 0; op < GGML_OP_COUNT; op++) {
            const uint64_t n = counts[op];
            total += n;
            if (n) {
                ops += (ops.empty() ? " " : ", ") + std::to_string(n) + " " + ggml_op_name((ggml_op) op);
            }
        }
        NEURON_LOG("%llu ops ran on %s%s%s\n", (unsigned long long) total, where, total ? ":" : "", ops.c_str());
    };
    print("NeuronCores", device);
    print("the CPU instead of a NeuronCore", cpu);
    if (fallback.bytes()) {
        NEURON_LOG("%s\n", fallback.summary().c_str());
    }
    if (uploaded + kept) {
        NEURON_LOG("%.3f MiB of host memory were copied to NeuronCores, and %.3f MiB of weights that stay there\n",
                   (double) uploaded / (1 << 20), (double) kept / (1 << 20));
    }
    print_groups();
    if (pieces) {
        NEURON_LOG("kernels for other numbers of tokens were launched %llu times, with %llu rows of padding\n",
                   (unsigned long long) pieces.load(), (unsigned long long) padding.load());
    }
    if (moves) {
        NEURON_LOG("%llu copies kept results apart from inputs, or gave kernels more rows\n",
                   (unsigned long long) moves.load());
    }
}

void neuron_counts::print_groups() const {
    uint64_t    others = 0;
    std::string reasons;
    for (int reason = 0; reason < NEURON_UNGROUPED_COUNT; reason++) {
        const uint64_t n = outside[reason];
        others += n;
        if (n) {
            reasons +=
                (reasons.empty() ? ": " : "; ") + std::to_string(n) + " because " + neuron_ungrouped_name(reason);
        }
    }
    if (launches) {
        NEURON_LOG("%llu ops ran in groups, in %llu launches, %.1f ops each\n", (unsigned long long) grouped.load(),
                   (unsigned long long) launches.load(), (double) grouped / (double) launches);
    }
    if (others) {
        NEURON_LOG("%llu ops were in no group%s\n", (unsigned long long) others, reasons.c_str());
    }
}
