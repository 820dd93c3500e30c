// Counts the work of a process, and where it was computed. The destructor prints the counts for GGML_NEURON_LOG.

#pragma once

#include "fallback/cost.h"
#include "ggml.h"
#include "select/groups.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

// Bytes between host and NeuronCores per call. A call is all work of a program up to the read of a graph's results. It
// begins with the first write after such a graph, so reads behind the graph belong to it.
class neuron_host_traffic {
  public:
    struct counts {
        uint64_t bytes_in  = 0;  // to NeuronCores
        uint64_t writes    = 0;
        uint64_t bytes_out = 0;  // from NeuronCores
        uint64_t reads     = 0;
    };

    void add_write(size_t size);
    void add_read(size_t size);

    // Notes a computed graph whose results the program reads.
    void end_graph();

    // Returns the traffic of the last call, and sets the number of calls.
    counts last(uint64_t & n_calls) const;

  private:
    mutable std::mutex mutex;
    counts             current;
    uint64_t           n_calls = 0;      // calls that ended
    bool               ended   = false;  // the current call ended, except for reads
};

struct neuron_metrics {
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> device{};
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> cpu{};
    std::atomic<uint64_t>                            moves{ 0 };
    neuron_fallback_cost                             fallback;

    // Bytes of host tensors that were copied to NeuronCores; the bytes among them of weights, which stay there.
    std::atomic<uint64_t> uploaded{ 0 };
    std::atomic<uint64_t> kept{ 0 };

    // Sums of partial results over devices (-sm tensor), and the bytes that they read and wrote on all devices.
    std::atomic<uint64_t> reductions{ 0 };
    std::atomic<uint64_t> reduced{ 0 };

    // The number of times that a mask or row numbers were examined: from the host copy, and read back from the device.
    std::atomic<uint64_t> recalled{ 0 };
    std::atomic<uint64_t> read_back{ 0 };

    // Counts of groups and launches.
    std::atomic<uint64_t>                                     launches{ 0 };
    std::atomic<uint64_t>                                     grouped{ 0 };  // ops in groups
    std::array<std::atomic<uint64_t>, NEURON_UNGROUPED_COUNT> outside{};     // other ops, by reason
    std::atomic<uint64_t> found_before{ 0 };  // graphs whose groups were known before the graph was allocated

    // The number of times that the answer for an op was cached, and that its kernels were searched for.
    std::atomic<uint64_t> answered{ 0 };
    std::atomic<uint64_t> looked_for{ 0 };

    // Ops that kernels for other numbers of tokens computed.
    std::atomic<uint64_t> pieces{ 0 };
    std::atomic<uint64_t> padding{ 0 };  // rows beyond the ops' own, or computed twice

    neuron_host_traffic traffic;

    ~neuron_metrics();

  private:
    void print_groups() const;
};

extern neuron_metrics g_metrics;
