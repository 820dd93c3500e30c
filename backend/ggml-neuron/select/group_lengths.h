// Checks whether a kernel for more tokens, or for a longer cache, computes a group. Graph kernels have exact lengths,
// and graphs have any.
//
// The group's key and the kernel's key are equal except for extents, some of which are larger in the kernel. A walk
// through the nodes, in order, checks two things. First, each of the group's elements must be computed from the group's
// own elements alone, for any values beyond them, by the rules beside each op in tools/kernelgen/ggml/ops.py. Second,
// the kernel must not write beyond the group's elements. The kernel then reads one of three things beyond: copies of
// the group's rows; more cells of the cache, under a mask; or columns of the mask that hide cells. With flash attention
// one op hides them. Without it the scores of cells pass through several ops, up to the sum where their weight is 0.
// Attention without a cache reads the group's own rows: the mask hides the copies like cells. A mean of rows weighs
// copies with 0.
//
// If each of several sequences has its own node of attention (select/streams.h), each sequence's tokens are a block of
// rows. The kernel has more rows in each block: the block's own rows, and then their repetitions. The host computes row
// numbers that refer to blocks for the kernel.

#pragma once

#include "select/causality.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// The bytes beyond the group's own bytes that a kernel for longer groups reads in a slot or writes to a result.
struct neuron_group_room {
    enum kind_t : uint8_t {
        NONE,   // nothing: the bytes are equal
        ROWS,   // the rows again; in a result any values
        CELLS,  // the next bytes in memory: more cells of the cache
        WIDER,  // columns of a neuron_fill, and then the rows again
    };

    kind_t kind   = NONE;
    size_t size   = 0;     // the kernel's bytes
    size_t period = 0;     // ROWS: bytes of the group's rows, after which they repeat
    size_t node   = 0;     // WIDER: a node of the group that has the matrix as a source
    size_t source = 0;     // number of that source
    size_t row    = 0;     // bytes per token for a group in pieces; 0: each piece has all

    neuron_wider wider;    // WIDER: the kernel's matrix

    neuron_blocks blocks;  // ROWS: each block is repeated
    neuron_blocks named;   // blocks that row numbers refer to; one block: the numbers stay unchanged
};

// Rows that a node of a group writes to memory, and attention that reads them.
struct neuron_group_causal_condition {
    static constexpr size_t ROWS_SOURCE = 1;  // number of SET_ROWS's source

    size_t          writer;                   // a SET_ROWS, by its number in the group
    size_t          reader;                   // a node with the mask
    size_t          mask;                     // number of the mask's source
    neuron_cell_map cells;
};

// How a kernel computes a group, or pieces of it, if the mask hides what `causal_conditions` require.
struct neuron_group_fit {
    std::vector<neuron_group_room> slots;
    std::vector<neuron_group_room> results;       // of the results used outside, in the order of the nodes
    int64_t                        padding  = 0;  // rows of the first node beyond the group's own
    int64_t                        n        = 0;  // tokens of a group in pieces; 0: the kernel computes the whole group
    int64_t                        n_kernel = 0;  // tokens of the kernel
    std::vector<neuron_group_causal_condition> causal_conditions;
};

// Returns whether a kernel computes a whole group, and sets `fit`. The keys must have the same wiring.
bool neuron_fit_whole(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit);

// Returns whether some rows of a group, from any row on, form the group with key `rows`, and sets `fit`. They may
// differ in the cells that attention reads and that other rows write. In `fit`, each slot of kind ROWS has rows that
// are cut.
bool neuron_fit_rows(const neuron_key & rows, const neuron_key & group, neuron_group_fit & fit);
