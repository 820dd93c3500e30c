// What a process computed, and where: its destructor prints it for GGML_NEURON_LOG.

#pragma once

#include "fallback/cost.h"
#include "ggml.h"
#include "select/groups.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

// What goes over the host for a call, which is all that a program has computed until it reads what a graph computes. A call begins with the
// first write after such a graph: what is read behind the graph is the call's.
class neuron_host_traffic {
  public:
    struct counts {
        uint64_t bytes_in  = 0;  // to NeuronCores
        uint64_t writes    = 0;
        uint64_t bytes_out = 0;  // from them
        uint64_t reads     = 0;
    };

    void add_write(size_t size);
    void add_read(size_t size);

    // Notes that a graph is computed which the program reads.
    void end_graph();

    // Returns what the last call moved, and sets the number of calls.
    counts last(uint64_t & n_calls) const;

  private:
    mutable std::mutex mutex;
    counts             current;
    uint64_t           n_calls = 0;      // that ended
    bool               ended   = false;  // the current one did, except for what is read
};

struct neuron_metrics {
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> device{};
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> cpu{};
    std::atomic<uint64_t>                            moves{ 0 };
    neuron_fallback_cost                             fallback;

    // Bytes of tensors in host memory that were copied to NeuronCores, and of these those of weights, which stay there.
    std::atomic<uint64_t> uploaded{ 0 };
    std::atomic<uint64_t> kept{ 0 };

    // Sums of partial results over devices (-sm tensor), and the bytes that these read and wrote on all devices.
    std::atomic<uint64_t> reductions{ 0 };
    std::atomic<uint64_t> reduced{ 0 };

    // Times that a mask or numbers of rows were looked at: as the program wrote them, or read from the device.
    std::atomic<uint64_t> recalled{ 0 };
    std::atomic<uint64_t> read_back{ 0 };

    // Of groups.
    std::atomic<uint64_t>                                     launches{ 0 };
    std::atomic<uint64_t>                                     grouped{ 0 };  // ops in them
    std::array<std::atomic<uint64_t>, NEURON_UNGROUPED_COUNT> outside{};     // other ops, by reason
    std::atomic<uint64_t> found_before{ 0 };  // graphs of which they were known before the graph had memory

    // Times that what computes an op was known, and that its kernels were looked for.
    std::atomic<uint64_t> answered{ 0 };
    std::atomic<uint64_t> looked_for{ 0 };

    // Of ops that kernels for other numbers of tokens computed.
    std::atomic<uint64_t> pieces{ 0 };
    std::atomic<uint64_t> padding{ 0 };  // rows beyond the ops' own, or computed twice

    neuron_host_traffic traffic;

    ~neuron_metrics();

  private:
    void print_groups() const;
};

extern neuron_metrics g_metrics;
