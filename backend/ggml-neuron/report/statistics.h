// Statistics of graphs that a backend computed at least in part: how many ops ran on the device, and how many ran
// elsewhere because they have no kernel.
//
// ggml's scheduler gives a backend only its own parts of a graph. But such a part refers to the set of all tensors of
// the graph (ggml_cgraph::visited_hash_set), so the ops of other backends can be counted, too.

#pragma once

#include "device/core.h"
#include "ggml-impl.h"
#include "plan/plan.h"
#include "report/missing.h"
#include "select/kernel_store.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// Ops of one graph: the nodes to compute. Views, and nodes without elements, do not count.
struct neuron_graph_statistics {
    size_t ops     = 0;
    size_t device  = 0;  // computed by kernels of this device
    size_t lacking = 0;  // computed by the CPU or another backend, because they have no kernel
    size_t splits  = 0;  // parts of the graph that the scheduler gave this device

    std::shared_ptr<const neuron_reasons>  elsewhere{};  // of ops in other backends' parts
    std::shared_ptr<const neuron_plan_ops> own{};        // of the first part
};

// Returns whether the core can use a tensor in place.
using neuron_is_on_core_t = bool (*)(const neuron_core & core, const ggml_tensor * t);

class neuron_statistics {
  public:
    neuron_statistics(neuron_core & core, const neuron_kernel_store & kernels, neuron_is_on_core_t is_on_core) :
        core(core), kernels(kernels), is_on_core(is_on_core) {}

    // locked. Notes that a graph, or a part of one, is computed as planned. Reports its ops without kernels, each once.
    void add(const ggml_cgraph * cgraph, const neuron_plan & plan);

    // Returns one line about the graph with the most ops without a kernel, or "" when there is none.
    std::string summary();

  private:
    // Results of scanning a graph before its parts are computed.
    struct scan {
        size_t                                ops = 0;
        std::shared_ptr<const neuron_reasons> reasons{};
        std::map<ggml_op, size_t>             lacking{};  // ops without a kernel in the parts of other backends
    };

    const scan & scan_of(const ggml_cgraph * first, neuron_missing_ops & missing);
    scan         make_scan(const ggml_cgraph * first, neuron_missing_ops & missing) const;
    std::string  lack_of(const ggml_tensor * node) const;
    bool         is_kept_elsewhere(const ggml_tensor * node) const;
    void         end_graph();

    neuron_core &               core;
    const neuron_kernel_store & kernels;
    const neuron_is_on_core_t   is_on_core;

    std::unordered_map<uint64_t, scan> scans;  // by the number of a graph's first part

    neuron_graph_statistics current;
    neuron_graph_statistics worst;
    uint64_t                n_graphs  = 0;
    uint64_t                n_lacking = 0;  // graphs with such ops

    // The part that was computed last.
    const void *          set = nullptr;  // set of the graph's tensors
    ggml_tensor * const * end = nullptr;  // end of its nodes
};

// Notes that the device refused an op because it has no kernel for it.
void neuron_note_refused(const ggml_tensor * op);

// Returns one line about these ops if no graph was ever computed on a device, or "" if one was, or nothing was refused.
std::string neuron_nothing_computed();
