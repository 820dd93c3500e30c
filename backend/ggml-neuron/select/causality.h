// Causality: whether attention's mask hides from tokens what later tokens write to a cache.
//
// A group writes rows of a cache and then reads it. Where it is computed some tokens after the other, the first ones read what
// later ones have not written yet. That makes no difference where the mask hides it, as a causal one does: which the mask and
// the numbers of the rows tell, each time that they are computed with.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// Where rows that SET_ROWS writes are among the cells that attention reads.
struct neuron_cell_map {
    static constexpr int64_t NONE    = -1;  // in no cell
    static constexpr int64_t SEVERAL = -2;  // or may be

    struct axis {
        int64_t  ne;
        uint64_t nb;

        bool operator==(const axis & other) const { return ne == other.ne && nb == other.nb; }
    };

    int64_t             offset     = 0;  // bytes from the first cell to row 0
    uint64_t            row_stride = 0;  // bytes
    uint64_t            row_size   = 0;  // bytes that are written
    axis                cells{ 1, 1 };
    std::array<axis, 3> outer{};         // axes of larger strides, the largest first
    size_t              n_outer = 0;

    // Sets the axes to those of a tensor that is read, of which one is that of the cells. Returns false when their strides do not tell
    // the elements' places apart.
    bool set_axes(const int64_t ne[4], const uint64_t nb[4], int cells_axis);

    // Returns in which cell a row is.
    int64_t cell_of(int64_t row) const;

    bool operator==(const neuron_cell_map & other) const;
};

// A condition for tokens to be computed in pieces: the mask hides from each what later ones write.
struct neuron_causal_condition {
    const ggml_tensor *       rows;    // numbers of the rows that are written, as many for each token: I32 or I64
    const ggml_tensor *       mask;    // F16 or F32: a row of it is a token's
    neuron_cell_map           cells;
    std::vector<neuron_range> pieces;  // of the mask's tokens

    bool operator==(const neuron_causal_condition & other) const;
};

// A condition for kernels that have some rows of a cache alone, the first ones or those of a sequence: no other is written.
struct neuron_row_condition {
    const ggml_tensor * rows;       // numbers of the rows that are written: I32 or I64
    int64_t             first;      // that kernels have
    int64_t             n;
    neuron_range        numbers{};  // of those of the tensor; none: all

    bool operator==(const neuron_row_condition & other) const {
        return rows == other.rows && first == other.first && n == other.n && numbers.first == other.numbers.first &&
               numbers.n == other.numbers.n;
    }
};

// FLASH_ATTN_EXT whose kernels leave out cells (tools/kernelgen/ggml/causality.py): a bit of the parameters in a key, which ggml leaves 0,
// says so, and of as many tokens each has the cells up to the last one's alone, as if the kernel's tokens were in its last cells.
constexpr size_t   NEURON_CAUSAL_WORD   = 7;
constexpr uint64_t NEURON_CAUSAL_BIT    = (uint64_t) 1 << 32;
constexpr int64_t  NEURON_CAUSAL_TOKENS = 128;

constexpr size_t NEURON_FLASH_ATTN_MASK = 3;  // which source it is

// Returns whether a node is attention of which there may be such a kernel.
bool neuron_may_be_causal(const ggml_tensor * node);

// What such a kernel computes, as its key says.
struct neuron_causal_kernel {
    int64_t n_tokens = 0;  // 0: it is a different kernel
    int64_t n_cells  = 0;

    explicit neuron_causal_kernel(const neuron_key_node & node);

    // Returns whether it leaves out cells of a mask.
    bool leaves_out(const ggml_tensor * mask) const {
        return n_tokens > NEURON_CAUSAL_TOKENS && mask->ne[0] > seen(NEURON_CAUSAL_TOKENS - 1);
    }

    // Returns how many cells a token has.
    int64_t seen(int64_t token) const {
        const int64_t end = (token / NEURON_CAUSAL_TOKENS + 1) * NEURON_CAUSAL_TOKENS;
        return n_cells - n_tokens + (end < n_tokens ? end : n_tokens);
    }
};

// A condition for these kernels: the mask hides from some of its tokens, which are a launch's, the cells that the kernel leaves out.
struct neuron_hidden_condition {
    const ggml_tensor *  mask;
    neuron_range         tokens;
    neuron_causal_kernel kernel;

    bool operator==(const neuron_hidden_condition & other) const;
};

// Conditions that are known not to be met where a graph is computed.
struct neuron_unmet {
    static constexpr size_t N = 8;

    bool causal = false;  // earlier tokens see rows of a cache that later ones write
    bool rows   = false;  // rows of a cache are written that kernels for its first rows lack
    bool hidden = false;  // tokens see cells that kernels leave out

    explicit operator bool() const { return causal || rows || hidden; }

    // Returns what is not met of either.
    neuron_unmet operator|(const neuron_unmet & other) const {
        return { causal || other.causal, rows || other.rows, hidden || other.hidden };
    }

    size_t index() const { return (causal ? 1 : 0) + (rows ? 2 : 0) + (hidden ? 4 : 0); }
};

// Returns whether a mask is as neuron_is_hidden reads it.
bool neuron_can_read_mask(const ggml_tensor * mask);

// Returns whether a condition is met. `mask` is what is in the tensor's memory.
bool neuron_is_hidden(const neuron_hidden_condition & condition, const uint8_t * mask);

// Returns whether a tensor is as neuron_are_rows_below reads it.
bool neuron_can_read_rows(const ggml_tensor * rows);

// Returns whether all numbers are those of the condition's rows. `data` is what is in the tensor's memory.
bool neuron_are_rows_among(const neuron_row_condition & condition, const uint8_t * data);

// Returns `n` numbers of rows as they count from row `first` on: the first `own` ones over and over.
std::vector<uint8_t> neuron_rows_from(const ggml_tensor * rows,
                                      const uint8_t *     data,
                                      int64_t             first,
                                      int64_t             own,
                                      int64_t             n);

// Returns `n` numbers of rows as kernels have them that have more rows of each of `named`: those of the tensor over and over, where
// they are in blocks themselves, of as many numbers, those of each.
std::vector<uint8_t> neuron_renamed_rows(const ggml_tensor *   rows,
                                         const uint8_t *       data,
                                         const neuron_blocks & named,
                                         bool                  in_blocks,
                                         int64_t               n);

// Returns whether both tensors are as neuron_is_causal reads them.
bool neuron_can_tell_causality(const ggml_tensor * rows, const ggml_tensor * mask);

// Returns whether the mask hides from the tokens of each piece all cells that tokens behind the piece write. Both arguments are
// what is in the tensors' memory.
bool neuron_is_causal(const neuron_causal_condition & condition, const uint8_t * rows, const uint8_t * mask);
