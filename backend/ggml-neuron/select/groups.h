// Finds groups of nodes in a graph that one kernel computes in one launch.
//
// A group is a run of consecutive nodes to compute. Its structure identifies it (select/group_key.h).

#pragma once

#include "ggml-impl.h"
#include "select/group.h"
#include "select/group_key.h"
#include "select/kernel_store.h"

#include <cstdint>
#include <utility>
#include <vector>

// Why a node is in no group.
enum neuron_ungrouped : uint8_t {
    NEURON_UNGROUPED_OP,      // no group has such a node
    NEURON_UNGROUPED_PLACE,   // groups have it, but among other nodes
    NEURON_UNGROUPED_LENGTH,  // its group has kernels for other lengths, and none computes this one
    NEURON_UNGROUPED_ORDER,   // its group needs pieces, but earlier tokens read cells that later ones write
    NEURON_UNGROUPED_CUT,     // its part of the graph ends before the group does
    NEURON_UNGROUPED_WIRING,  // its group's nodes use each other, or memory, in another way
    NEURON_UNGROUPED_RESULT,  // another result of its group is used outside, is an output, or is examined by the program
    NEURON_UNGROUPED_MEMORY,  // its group's tensors overlap in memory
    NEURON_UNGROUPED_KERNEL,  // its group's kernel is unusable
    NEURON_UNGROUPED_COUNT,
};

// Returns a reason in words.
const char * neuron_ungrouped_name(int reason);

struct neuron_groups {
    std::vector<neuron_group>                     groups;   // in the order of the graph
    std::vector<std::pair<int, neuron_ungrouped>> outside;  // the other nodes, by their numbers in cgraph->nodes
};

// Finds the groups of a graph that have kernels: the longest group that begins with the first node, then the longest
// group after it, and so on.
//
// unmet  conditions that are known to be unmet: groups that depend on them are left out
neuron_groups neuron_find_groups(const ggml_cgraph *         cgraph,
                                 const neuron_kernel_store & kernels,
                                 bool                        watched,
                                 neuron_unmet                unmet = {});
