// The key of a group of nodes of a ggml graph: the words of docs/reference/bundle-keys.md, "Key of a graph". It
// contains no addresses, so a group that is found before the graph is allocated (graph_optimize) has the same key
// afterwards.

#pragma once

#include "ggml-impl.h"
#include "select/group.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class neuron_streams;

// A variant of kernels that compute the same nodes under conditions.
struct neuron_variant {
    bool first_rows =
        false;  // they have only the cache's rows up to the last one that is read, where SET_ROWS writes to the cache
    bool causal = false;  // their attention leaves out cells (neuron_causal_kernel)
    bool open   = false;  // they are for any numbers of the nodes (select/numbers.h)

    static constexpr size_t N = 8;

    size_t index() const { return (first_rows ? 1 : 0) + (causal ? 2 : 0) + (open ? 4 : 0); }
};

// Returns the key of a kernel for some nodes of a graph, and fills in the group's slots and results. Returns no words
// when no kernel can be made for the nodes.
//
// watched  whether the program examines the graph's last node and its sources as soon as it is computed
// kernel   the key of a graph kernel with as many nodes, or NULL. The group then has the kernel's slots. Several may
//          have the same tensor if no node writes to it. The group has no slots if the kernel's can't hold its tensors
// variant  the variant of the kernel
// streams  the owner of the graph; NULL: the graph is ggml's
std::vector<uint64_t> neuron_group_words(const ggml_cgraph *    cgraph,
                                         bool                   watched,
                                         neuron_group &         group,
                                         const uint64_t *       kernel  = nullptr,
                                         neuron_variant         variant = {},
                                         const neuron_streams * streams = nullptr);

// Returns how often the whole graph uses a tensor as a source, or -1 when the graph has no such count.
int64_t neuron_uses_in_graph(const ggml_cgraph * cgraph, const ggml_tensor * t);

// Returns whether a graph is a piece that the program examines (ggml_backend_sched_set_eval_callback): ggml's scheduler
// cuts such a piece from its part of the graph without giving it a number.
bool neuron_is_watched(const ggml_cgraph * cgraph);
