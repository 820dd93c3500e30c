#include "report/metrics.h"

#include "report/log.h"

#include <string>

neuron_metrics g_metrics;

void neuron_host_traffic::add_write(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (ended) {
        current = {};
        ended   = false;
    }
    current.bytes_in += size;
    current.writes++;
}

void neuron_host_traffic::add_read(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    current.bytes_out += size;
    current.reads++;
}

void neuron_host_traffic::end_graph() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (ended) {  // the program wrote nothing for this graph
        current = {};
    }
    ended = true;
    n_calls++;
}

neuron_host_traffic::counts neuron_host_traffic::last(uint64_t & n_calls) const {
    const std::lock_guard<std::mutex> lock(mutex);
    n_calls = this->n_calls;
    return current;
}

// A total, and a text with the number of each kind.
struct listed {
    uint64_t    total = 0;
    std::string text;
};

// Returns the sum of the counts, and a text that joins `describe` of each nonzero count and its index.
template <typename Counts, typename Describe>
static listed list(const Counts & counts, const char * separator, Describe describe) {
    listed result;
    for (size_t i = 0; i < counts.size(); i++) {
        const uint64_t n = counts[i];
        result.total += n;
        if (n) {
            result.text += (result.text.empty() ? "" : separator) + std::to_string(n) + " " + describe((int) i);
        }
    }
    return result;
}

neuron_metrics::~neuron_metrics() {
    const auto print = [](const char * where, const auto & counts) {
        const listed ops = list(counts, ", ", [](int op) { return std::string(ggml_op_name((ggml_op) op)); });
        NEURON_LOG("%llu ops ran on %s%s%s\n", (unsigned long long) ops.total, where, ops.total ? ": " : "",
                   ops.text.c_str());
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
    if (reductions) {
        NEURON_LOG("%llu reductions over NeuronCores went through the host's memory, %.3f MiB\n",
                   (unsigned long long) reductions.load(), (double) reduced / (1 << 20));
    }
    print_groups();
    if (pieces) {
        NEURON_LOG("kernels for other numbers of tokens were launched %llu times, with %llu rows of padding\n",
                   (unsigned long long) pieces.load(), (unsigned long long) padding.load());
    }
    if (recalled + read_back) {
        NEURON_LOG("masks and row numbers were read from the copy that the program wrote %llu times, and read from the "
                   "device %llu times\n",
                   (unsigned long long) recalled.load(), (unsigned long long) read_back.load());
    }
    if (looked_for) {
        NEURON_LOG("kernels of ops were searched %llu times, and taken from earlier searches %llu times\n",
                   (unsigned long long) looked_for.load(), (unsigned long long) answered.load());
    }
    if (moves) {
        NEURON_LOG("%llu copies were added to keep results apart from inputs, or to pad rows\n",
                   (unsigned long long) moves.load());
    }
    uint64_t   n_calls = 0;
    const auto moved   = traffic.last(n_calls);
    if (n_calls) {
        NEURON_LOG("the last of %llu calls moved %llu bytes to NeuronCores in %llu writes, and %llu bytes from them in "
                   "%llu reads\n",
                   (unsigned long long) n_calls, (unsigned long long) moved.bytes_in, (unsigned long long) moved.writes,
                   (unsigned long long) moved.bytes_out, (unsigned long long) moved.reads);
    }
}

void neuron_metrics::print_groups() const {
    const listed others =
        list(outside, "; ", [](int reason) { return std::string("because ") + neuron_ungrouped_name(reason); });
    if (launches) {
        NEURON_LOG("%llu ops ran in groups, in %llu launches, %.1f ops each\n", (unsigned long long) grouped.load(),
                   (unsigned long long) launches.load(), (double) grouped / (double) launches);
    }
    if (found_before) {
        NEURON_LOG("groups of %llu graphs were found before the graphs had memory\n",
                   (unsigned long long) found_before.load());
    }
    if (others.total) {
        NEURON_LOG("%llu ops were in no group: %s\n", (unsigned long long) others.total, others.text.c_str());
    }
}
