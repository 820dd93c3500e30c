// Graph kernels have exact lengths, graphs any: which kernels for more tokens, or for a longer cache, compute a group.
//
// The group's key and the kernel's say the same except for extents, of which the kernel's are larger somewhere. Going through the
// nodes in their order shows that the group's elements come out of the kernel as they should: that each is computed from
// the group's own alone, by the rules that stand beside each op in tools/kernelgen/ggml/ops.py, whatever is beyond; and that nothing
// is written beyond. What a kernel reads beyond is then one of three: copies of the group's rows; a cache that goes on, under a
// mask; columns of the mask, which hide it. With flash attention one op hides; without it the scores of cells go through
// several, which are followed to where they are summed with weight 0. Attention without a cache is to the rows of the group
// itself: their copies are masked as cells are. A mean of rows weighs copies with 0.
//
// Where attention is a node for each of several sequences (select/streams.h), each sequence's tokens are a block of rows: the kernel has
// more rows of each block, and behind its own come the block's again. Numbers that name rows of blocks are other ones in the kernel.

#pragma once

#include "select/causality.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// What a kernel for longer groups finds in a slot beyond the group's own bytes, or leaves in a result.
struct neuron_group_room {
    enum kind_t : uint8_t {
        NONE,   // it has the same bytes
        ROWS,   // the rows again; of a result anything
        CELLS,  // what is there in memory: the cache goes on
        WIDER,  // columns that hide or the like, and then the rows again
    };

    kind_t kind   = NONE;
    size_t size   = 0;     // bytes that the kernel has
    size_t period = 0;     // ROWS: bytes of the group's rows, from the first one to where it comes again
    size_t node   = 0;     // WIDER: a node of the group of which the matrix is a source
    size_t source = 0;     // which one
    size_t row    = 0;     // bytes for each token of a group in pieces; 0: each piece has all of it

    neuron_wider wider;    // WIDER: what the kernel has

    neuron_blocks blocks;  // ROWS: each of them is repeated
    neuron_blocks named;   // those of the rows that numbers name; one block: they stay as they are
};

// Rows that a node of a group writes to memory, and attention that reads it.
struct neuron_group_causal_condition {
    static constexpr size_t ROWS_SOURCE = 1;  // of SET_ROWS

    size_t          writer;                   // a SET_ROWS, by its number in the group
    size_t          reader;                   // a node that has the mask
    size_t          mask;                     // which of its sources that is
    neuron_cell_map cells;
};

// How a kernel computes a group, or pieces of it, if what `causal_conditions` say is hidden.
struct neuron_group_fit {
    std::vector<neuron_group_room>             slots;
    std::vector<neuron_group_room>             results;  // of those that are seen outside, in the order of the nodes
    int64_t                                    padding = 0;  // rows of the first node beyond the group's own
    int64_t                                    n = 0;  // tokens of a group in pieces; 0: the kernel computes all of it
    int64_t                                    n_kernel = 0;  // of the kernel
    std::vector<neuron_group_causal_condition> causal_conditions;
};

// Returns whether a kernel computes all of a group, whose key is wired as the kernel's, and sets `fit`.
bool neuron_fit_whole(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit);

// Returns whether some rows of a group of nodes, wherever they begin, are a group of nodes of fewer rows, with the key `rows`, in
// all but what attention sees of a cache that others of the rows are written to; sets `fit`, of which each ROWS has rows that
// are cut.
bool neuron_fit_rows(const neuron_key & rows, const neuron_key & group, neuron_group_fit & fit);
