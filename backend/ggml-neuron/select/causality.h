// Causality: whether attention's mask hides the cells that later tokens write to a cache.
//
// A group writes rows of a cache and then reads the cache. In pieces, the first tokens read rows that later tokens have
// not written yet. That is harmless if the mask hides those rows, as a causal mask does. The mask and the row numbers
// are checked for each graph.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// The mapping from rows that SET_ROWS writes to cells that attention reads.
struct neuron_cell_map {
    static constexpr int64_t NONE    = -1;  // the row is in no cell
    static constexpr int64_t SEVERAL = -2;  // the row is, or may be, in several cells

    struct axis {
        int64_t  ne;
        uint64_t nb;

        bool operator==(const axis & other) const { return ne == other.ne && nb == other.nb; }
    };

    int64_t             offset     = 0;  // bytes from the first cell to row 0
    uint64_t            row_stride = 0;  // bytes
    uint64_t            row_size   = 0;  // bytes per written row
    axis                cells{ 1, 1 };
    std::array<axis, 3> outer{};         // axes with larger strides, the largest first
    size_t              n_outer = 0;

    // Sets the axes to the axes of a tensor that is read; `cells_axis` is the cells' axis. Returns false when the
    // strides do not give each element a distinct place.
    bool set_axes(const int64_t ne[4], const uint64_t nb[4], int cells_axis);

    // Returns a row's cell.
    int64_t cell_of(int64_t row) const;

    bool operator==(const neuron_cell_map & other) const;
};

// A condition for computing tokens in pieces: the mask hides from each piece the cells that later pieces write.
struct neuron_causal_condition {
    const ggml_tensor *       rows;    // numbers of the written rows, equally many per token: I32 or I64
    const ggml_tensor *       mask;    // F16 or F32, with a row per token
    neuron_cell_map           cells;
    std::vector<neuron_range> pieces;  // ranges of the mask's tokens

    bool operator==(const neuron_causal_condition & other) const;
};

// A condition for kernels with only some rows of a cache, either the first ones or a sequence's rows: the graph writes
// no other rows.
struct neuron_row_condition {
    const ggml_tensor * rows;       // numbers of the written rows: I32 or I64
    int64_t             first;      // first row of the kernels
    int64_t             n;
    neuron_range        numbers{};  // range of the tensor's numbers; empty: all

    bool operator==(const neuron_row_condition & other) const {
        return rows == other.rows && first == other.first && n == other.n && numbers.first == other.numbers.first &&
               numbers.n == other.numbers.n;
    }
};

// A FLASH_ATTN_EXT whose kernel leaves out cells (tools/kernelgen/ggml/causality.py) has a bit in its key's parameters,
// which ggml leaves 0. The kernel's tokens are the last cells, and each block of NEURON_CAUSAL_TOKENS tokens has only
// the cells up to the block's last token.
constexpr size_t   NEURON_CAUSAL_WORD   = 7;
constexpr uint64_t NEURON_CAUSAL_BIT    = (uint64_t) 1 << 32;
constexpr int64_t  NEURON_CAUSAL_TOKENS = 128;

constexpr size_t NEURON_FLASH_ATTN_MASK = 3;  // number of the source

// Returns whether a node is attention for which such a kernel is possible.
bool neuron_may_be_causal(const ggml_tensor * node);

// The sizes of such a kernel, from its key.
struct neuron_causal_kernel {
    int64_t n_tokens = 0;  // 0: another kind of kernel
    int64_t n_cells  = 0;

    explicit neuron_causal_kernel(const neuron_key_node & node);

    // Returns whether it leaves out cells of a mask.
    bool leaves_out(const ggml_tensor * mask) const {
        return n_tokens > NEURON_CAUSAL_TOKENS && mask->ne[0] > seen(NEURON_CAUSAL_TOKENS - 1);
    }

    // Returns the number of cells for a token.
    int64_t seen(int64_t token) const {
        const int64_t end = (token / NEURON_CAUSAL_TOKENS + 1) * NEURON_CAUSAL_TOKENS;
        return n_cells - n_tokens + (end < n_tokens ? end : n_tokens);
    }
};

// A condition for these kernels: the mask hides from a launch's tokens the cells that the kernel leaves out.
struct neuron_hidden_condition {
    const ggml_tensor *  mask;
    neuron_range         tokens;
    neuron_causal_kernel kernel;

    bool operator==(const neuron_hidden_condition & other) const;
};

// Conditions that are known to be unmet for a graph.
struct neuron_unmet {
    static constexpr size_t N = 8;

    bool causal = false;  // earlier tokens read rows of a cache that later tokens write
    bool rows   = false;  // the graph writes rows of a cache that its kernels lack
    bool hidden = false;  // the mask shows cells that kernels leave out

    explicit operator bool() const { return causal || rows || hidden; }

    // Returns the union.
    neuron_unmet operator|(const neuron_unmet & other) const {
        return { causal || other.causal, rows || other.rows, hidden || other.hidden };
    }

    size_t index() const { return (causal ? 1 : 0) + (rows ? 2 : 0) + (hidden ? 4 : 0); }
};

// Returns whether neuron_is_hidden can read a mask.
bool neuron_can_read_mask(const ggml_tensor * mask);

// Returns whether a condition is met. `mask` is the tensor's data.
bool neuron_is_hidden(const neuron_hidden_condition & condition, const uint8_t * mask);

// Returns whether neuron_are_rows_among can read a tensor.
bool neuron_can_read_rows(const ggml_tensor * rows);

// Returns whether all numbers are in the condition's rows. `data` is the tensor's data.
bool neuron_are_rows_among(const neuron_row_condition & condition, const uint8_t * data);

// Returns `n` row numbers, counted from row `first`: the first `own` numbers, repeated.
std::vector<uint8_t> neuron_rows_from(const ggml_tensor * rows,
                                      const uint8_t *     data,
                                      int64_t             first,
                                      int64_t             own,
                                      int64_t             n);

// Returns `n` row numbers for kernels with more rows in each block of `named`: the tensor's numbers, repeated. If the
// numbers are in blocks themselves, each block is repeated separately.
std::vector<uint8_t> neuron_renamed_rows(const ggml_tensor *   rows,
                                         const uint8_t *       data,
                                         const neuron_blocks & named,
                                         bool                  in_blocks,
                                         int64_t               n);

// Returns whether neuron_is_causal can read both tensors.
bool neuron_can_tell_causality(const ggml_tensor * rows, const ggml_tensor * mask);

// Returns whether the mask hides from each piece's tokens all cells that later pieces write. `rows` and `mask` are the
// tensors' data.
bool neuron_is_causal(const neuron_causal_condition & condition, const uint8_t * rows, const uint8_t * mask);
