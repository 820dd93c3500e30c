// The key of a group of nodes: the words of docs/reference/bundle-keys.md, "Key of a graph", as a graph of ggml's says them. No address
// is in them, so that what is found before the graph has memory (graph_optimize) is found after it, too.

#pragma once

#include "ggml-impl.h"
#include "select/group.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class neuron_streams;

// Kernels that compute the same nodes where conditions are met.
struct neuron_variant {
    bool first_rows =
        false;            // they have of a cache that SET_ROWS writes the rows up to the last one that is read alone
    bool causal = false;  // their attention leaves out cells (neuron_causal_kernel)
    bool open   = false;  // they are for any numbers of the nodes (select/numbers.h)

    static constexpr size_t N = 8;

    size_t index() const { return (first_rows ? 1 : 0) + (causal ? 2 : 0) + (open ? 4 : 0); }
};

// Returns the words that a kernel for some nodes of a graph is found by, and fills in the group's slots and results; none
// when no kernel can be made for them.
//
// watched     whether the program looks at the graph's last node and at what it reads, as soon as it is computed
// kernel      the key of a graph kernel with as many nodes, or NULL: the group has its slots, of which several may have the same
//             tensor where nothing is written to it; none of the slots when they can't have the group's tensors
// variant     which kernels it is for
// streams     whose graph it is; NULL: ggml's
std::vector<uint64_t> neuron_group_words(const ggml_cgraph *    cgraph,
                                         bool                   watched,
                                         neuron_group &         group,
                                         const uint64_t *       kernel  = nullptr,
                                         neuron_variant         variant = {},
                                         const neuron_streams * streams = nullptr);

// Returns how many sources of the whole graph a tensor is, or -1 when the graph does not tell.
int64_t neuron_uses_in_graph(const ggml_cgraph * cgraph, const ggml_tensor * t);

// Returns whether a graph is a piece that the program looks at (ggml_backend_sched_set_eval_callback): one that ggml's
// scheduler has cut from its part without giving it a number.
bool neuron_is_watched(const ggml_cgraph * cgraph);
