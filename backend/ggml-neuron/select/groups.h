// Groups of nodes that one kernel computes in one launch: how they are found in a graph.
//
// A group is nodes that have to be computed and stand one after another. What it is known by is its structure: the words of
// docs/reference/bundle-keys.md, "Key of a graph". No address is in them, so that what is found before the graph has memory
// (graph_optimize) is found after it, too.

#pragma once

#include "ggml-impl.h"
#include "select/group.h"
#include "select/kernel_store.h"

#include <cstdint>
#include <utility>
#include <vector>

// Why a node is in no group.
enum neuron_ungrouped : uint8_t {
    NEURON_UNGROUPED_OP,      // no group has such a node
    NEURON_UNGROUPED_PLACE,   // groups have it, but among other nodes
    NEURON_UNGROUPED_LENGTH,  // its group has kernels for other lengths, none of which computes this one
    NEURON_UNGROUPED_ORDER,   // its group would be computed in pieces, but earlier tokens see what later ones write
    NEURON_UNGROUPED_CUT,     // its part of the graph ends before the group does
    NEURON_UNGROUPED_WIRING,  // its group's nodes use each other, or memory, in another way
    NEURON_UNGROUPED_RESULT,  // another result of its group is used outside of it, or is an output, or is looked at
    NEURON_UNGROUPED_MEMORY,  // its group's tensors overlap in memory
    NEURON_UNGROUPED_KERNEL,  // its group's kernel can't be used
    NEURON_UNGROUPED_COUNT,
};

// Returns a reason in words.
const char * neuron_ungrouped_name(int reason);

class neuron_streams;

struct neuron_groups {
    std::vector<neuron_group>                     groups;   // in the order of the graph
    std::vector<std::pair<int, neuron_ungrouped>> outside;  // the other nodes, by their numbers in cgraph->nodes
};

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

// Finds the groups of a graph that there are kernels for: from its first node on the longest one that fits, and so on after it.
//
// unmet  conditions that are known not to be met: then groups are not computed so that they depend on them
neuron_groups neuron_find_groups(const ggml_cgraph *         cgraph,
                                 const neuron_kernel_store & kernels,
                                 bool                        watched,
                                 neuron_unmet                unmet = {});

// Returns how many sources of the whole graph a tensor is, or -1 when the graph does not tell.
int64_t neuron_uses_in_graph(const ggml_cgraph * cgraph, const ggml_tensor * t);

// Returns whether a graph is a piece that the program looks at (ggml_backend_sched_set_eval_callback): one that ggml's
// scheduler has cut from its part without giving it a number.
bool neuron_is_watched(const ggml_cgraph * cgraph);
