// What computes nodes that stand one after another, or a node alone: kernels, and what these have of memory.

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

// Memory that a group is given.
struct neuron_group_slot {
    ggml_tensor * tensor  = nullptr;     // the root of what its nodes use; NULL: the node's source below, if it has it
    size_t        offset  = 0;           // in the tensor, of what the group uses of it
    size_t        size    = 0;           // bytes
    bool          written = false;       // it is changed, besides the results
    bool          summed  = false;       // by a sum over devices, in place
    size_t        row     = 0;           // bytes of it for each token of a group in pieces; 0: each piece has all of it
    size_t        source  = 0;           // of a node alone, where the tensor is not known

    int64_t             first = 0;       // of numbers of rows: the one that is a kernel's first
    neuron_group_room   room;            // that kernels have
    const ggml_tensor * mask = nullptr;  // where columns are added to it; NULL: the tensor

    std::shared_ptr<const neuron_laid> laid;  // how the kernel of a node alone has it, where it is laid out

    std::vector<int> numbers;  // nodes whose numbers it is (select/numbers.h), by their places; it has no tensor then

    // Returns whether kernels read on in a cache behind the group's cells.
    bool goes_on() const { return room.kind == neuron_group_room::CELLS; }
};

// What a group computes that is seen outside.
struct neuron_group_result {
    ggml_tensor * tensor = nullptr;  // NULL: the node
    size_t        size   = 0;        // bytes that kernels have; 0: the tensor's
    size_t        row    = 0;        // bytes for each token of a group in pieces; 0: each piece has all of it
    int           alias  = NEURON_KERNELS_NO_ALIAS;  // the slot whose memory it shares, of an op in place
    size_t        offset = 0;                        // in the tensor
    size_t        own    = 0;                        // bytes of the tensor; 0: all
    neuron_blocks blocks;                            // that kernels have more rows of

    std::shared_ptr<const neuron_laid> laid;         // as that of a slot
};

// A launch for some tokens of a group, or for all of it.
struct neuron_group_piece {
    static constexpr int PREVIOUS = -1;  // what the launch before has computed
    static constexpr int ABSENT   = -2;
    static constexpr int ALL      = -1;

    neuron_kernel    kernel;
    neuron_range     range{};
    std::vector<int> inputs;         // slots, or one of the above; none: all slots in their order
    size_t           between = 0;    // bytes that it computes for the launch behind it alone; 0: it computes results
    int              result  = ALL;  // the one that it computes
};

// Nodes that one kernel computes, or several some tokens after the other: what is known as a group, or a node or attention alone.
struct neuron_group {
    std::vector<int>                 nodes;             // in cgraph->nodes; none: any node like one
    std::vector<neuron_group_slot>   slots;
    std::vector<neuron_group_result> results;           // in the order of the nodes
    std::vector<neuron_group_piece>  pieces;            // in turn; none: nothing computes it
    int64_t                          rows     = 0;      // tokens for which slots and results with rows have room
    bool                             fused    = false;  // graph kernels compute it
    bool                             other    = false;  // kernels are for other numbers of tokens, or a longer cache
    bool                             laid_out = false;  // the host puts where the kernel of a node alone has it
    int64_t                          padding  = 0;  // rows of them beyond the group's own, or that are computed twice
    bool                             unusable = false;       // its kernels could not be bound

    std::vector<neuron_causal_condition> causal_conditions;  // without which it can't be computed in pieces
    std::vector<neuron_row_condition>    row_conditions;     // without which its kernels lack rows that are written
    std::vector<neuron_hidden_condition> hidden_conditions;  // without which its kernels leave out cells that are seen
    int64_t                              n_rows = 0;  // the same of a SET_ROWS alone: those that kernels have; 0: all

    explicit operator bool() const { return !pieces.empty(); }

    int first() const { return nodes.front(); }

    int last() const { return nodes.back(); }

    // Returns whether the tensors that kernels read on are long enough.
    bool has_room() const;

    // Returns the kernels of all pieces.
    std::vector<neuron_kernel> kernels() const;
};
