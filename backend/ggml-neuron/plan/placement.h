// Where the operands of a graph's nodes are for their kernels: in device memory, where they are, or in scratch memory.

#pragma once

#include "plan/group_plan.h"
#include "plan/plan.h"
#include "select/unfused_attention.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Where the operands of one node are for its kernels: those in device memory where they are, the others in the core's scratch
// memory, which every node of a graph uses from the same place on.
struct neuron_placement {
    neuron_operand operands[GGML_MAX_SRC + 1];     // sources, then the result; memory NULL stands for scratch memory
    neuron_operand home[GGML_MAX_SRC + 1];         // where the node's own really are, without what kernels have besides
    bool           staged[GGML_MAX_SRC + 1] = {};  // from or to host memory
    bool        moved[GGML_MAX_SRC + 1]  = {};  // to keep it apart from the result, or because the kernel has more rows
    bool        filled[GGML_MAX_SRC + 1] = {};  // rows that the node does not have are copies of those that it has
    bool        shared[GGML_MAX_SRC + 1] = {};  // made once for all nodes that have it
    int         n_src                    = 0;
    size_t      scratch                  = 0;   // bytes
    std::string message;                        // why it can't be; empty when it can
};

// A mask made longer, by what it depends on.
struct neuron_mask_place {
    const ggml_tensor * mask;
    int64_t             n_more;
    int64_t             rows;
    size_t              offset;  // in scratch memory
    size_t              size;
};

// A node that has to be computed, or a group of nodes or attention, and what computes it.
struct neuron_candidate {
    std::vector<int>       nodes;  // in cgraph->nodes; all of a group or of attention
    neuron_selection       selection;
    neuron_signature       signature;
    neuron_placement       placement;
    neuron_group *         group = nullptr;
    neuron_group_placement group_placement;

    std::shared_ptr<neuron_attention> attention;  // signature and placement are those of all of it
    size_t between[2] = {};                       // where in scratch memory results between its nodes are, in turn

    // Returns the node, or its attention as one.
    const ggml_tensor * node(const ggml_cgraph * cgraph) const {
        return attention ? &attention->whole : cgraph->nodes[nodes.back()];
    }

    const neuron_kernel & first_kernel() const { return selection.pieces.front().kernel; }

    // Returns a tensor of the node as the kernels together have it: a source, or the result behind them.
    neuron_kernels_tensor whole(int i) const {
        return selection.cut.piece(signature, i, selection.rows(), selection.n_more);
    }
};

inline bool neuron_is_updated(const neuron_kernel & kernel, int src) {
    return kernel.updates >> src & 1;
}

// Places the operands of a node, whose own scratch memory begins at `scratch`; the candidate's placement says why it can't be.
void neuron_place(const neuron_core &                    core,
                  neuron_locate_t                        locate,
                  const ggml_tensor *                    node,
                  const std::vector<neuron_mask_place> & masks,
                  size_t                                 scratch,
                  neuron_candidate &                     c);

// Gives the masks that nodes and groups need longer their places in scratch memory, from its beginning; returns how much they
// take.
size_t neuron_place_masks(const ggml_cgraph *                   cgraph,
                          const std::vector<neuron_candidate> & candidates,
                          std::vector<neuron_mask_place> &      masks);
