// Which groups can be computed some rows after the other, by a kernel for fewer tokens than they have.
//
// The group's key and the kernel's say the same but for extents: those of the tokens are smaller in the kernel, those of the cache
// may be larger. Between the two is what the kernel is to compute, a piece: with the kernel's tokens and the group's cache. That
// any rows of the group are such a piece, and that the kernel computes it, select/group_lengths.h finds out. What is left is memory that the
// group writes and reads: the rows of a cache that a later piece writes have to be masked for this one (select/causality.h).

#pragma once

#include "select/causality.h"
#include "select/group_lengths.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// Rows that a node of a group writes to memory, and attention that reads it.
struct neuron_group_causal_condition {
    size_t          writer;  // a SET_ROWS, by its number in the group
    size_t          reader;  // a node that has the mask
    size_t          mask;    // which of its sources that is
    neuron_cell_map cells;
};

struct neuron_group_cut {
    static constexpr size_t ROWS_SOURCE = 1;  // of SET_ROWS

    int64_t             n        = 0;         // tokens of the group
    int64_t             n_kernel = 0;         // of the kernel
    neuron_group_fit    fit;                  // of the kernel to a piece
    std::vector<size_t> slot_rows;            // bytes of a slot for each token; 0: each piece has all of it
    std::vector<size_t> result_rows;          // the same of results
    std::vector<neuron_group_causal_condition> causal_conditions;
};

// Returns whether the kernel with one key of n_words computes a group of nodes with another one in pieces, provided that what
// `cut.causal_conditions` say is masked; sets `cut`. Both are keys of graphs without mistakes.
bool neuron_cut_group(const uint64_t * group, const uint64_t * kernel, size_t n_words, neuron_group_cut & cut);
