// The kernels that compute consecutive nodes, or a single node, and the memory of these kernels.

#pragma once

#include "ggml.h"
#include "neuron_kernels.h"
#include "select/causality.h"
#include "select/group_lengths.h"
#include "select/kernel.h"
#include "select/laid_out.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// Memory that a group reads or changes.
struct neuron_group_slot {
    ggml_tensor * tensor =
        nullptr;  // the root of a tensor that its nodes use; NULL: the node's source number `source`, if it has one
    size_t offset  = 0;                       // in the tensor, to the group's first byte
    size_t size    = 0;                       // bytes
    bool   written = false;                   // changed, besides the results
    bool   summed  = false;                   // changed in place by a sum over devices
    size_t row     = 0;                       // bytes per token for a group in pieces; 0: each piece has the whole slot
    size_t source  = 0;                       // for a single node, if the tensor is unknown

    int64_t             first = 0;            // for row numbers: the first row that the kernel has
    neuron_group_room   room;                 // the kernels' room
    const ggml_tensor * mask = nullptr;       // the tensor whose matrix gets more columns; NULL: `tensor`

    std::shared_ptr<const neuron_laid> laid;  // the layout of a single node's kernel, if the tensor is laid out for it

    std::vector<int> numbers;  // the nodes whose numbers this slot holds (select/numbers.h); such a slot has no tensor

    // Returns whether kernels read on in a cache behind the group's cells.
    bool goes_on() const { return room.kind == neuron_group_room::CELLS; }
};

// A result of a group that is used outside of it.
struct neuron_group_result {
    ggml_tensor * tensor = nullptr;  // NULL: the node
    size_t        size   = 0;        // the kernels' bytes; 0: the tensor's
    size_t        row    = 0;        // bytes per token for a group in pieces; 0: each piece has the whole result
    int           alias  = NEURON_KERNELS_NO_ALIAS;  // the slot whose memory it shares, for an op in place
    size_t        offset = 0;                        // in the tensor
    size_t        own    = 0;                        // bytes in the tensor; 0: all
    neuron_blocks blocks;                            // blocks with more rows in the kernels

    std::shared_ptr<const neuron_laid> laid;         // as for a slot
};

// A launch for some tokens of a group, or for the whole group.
struct neuron_group_piece {
    static constexpr int PREVIOUS = -1;  // the intermediate result of the previous launch
    static constexpr int ABSENT   = -2;
    static constexpr int ALL      = -1;

    neuron_kernel    kernel;
    neuron_range     range{};
    std::vector<int> inputs;         // slots, PREVIOUS or ABSENT; none: all slots in order
    size_t           between = 0;    // bytes that it computes for the next launch only; 0: it computes results
    int              result  = ALL;  // number of the result that it computes
};

// Nodes that one kernel computes at once, or several kernels for some tokens each: a group of several nodes, a single
// node, or attention.
struct neuron_group {
    std::vector<int>                 nodes;          // in cgraph->nodes; empty: any node of this kind
    std::vector<neuron_group_slot>   slots;
    std::vector<neuron_group_result> results;        // in the order of the nodes
    std::vector<neuron_group_piece>  pieces;         // in turn; empty: no kernel computes it
    int64_t                          rows  = 0;      // number of tokens that slots and results with `row` have room for
    bool                             fused = false;  // graph kernels compute it
    bool                             other = false;  // the kernels are for other numbers of tokens, or a longer cache
    bool                             laid_out = false;  // the host lays out the tensors of a single node for the kernel
    int64_t                          padding  = 0;      // rows of the kernels beyond the group's own, or computed twice
    bool                             unusable = false;  // its kernels could not be bound

    std::vector<neuron_causal_condition> causal_conditions;  // required for computing it in pieces
    std::vector<neuron_row_condition>    row_conditions;     // required by kernels that have only some rows of a cache
    std::vector<neuron_hidden_condition> hidden_conditions;  // required by kernels that leave out cells
    int64_t                              n_rows = 0;  // for a single SET_ROWS, the rows that its kernels have; 0: all

    explicit operator bool() const { return !pieces.empty(); }

    int first() const { return nodes.front(); }

    int last() const { return nodes.back(); }

    // Returns whether the tensors that kernels read beyond the group's end are long enough.
    bool has_room() const;

    // Returns the kernels of all pieces.
    std::vector<neuron_kernel> kernels() const;
};
