#include "select/causality.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <utility>

bool neuron_cell_map::set_axes(const int64_t ne[4], const uint64_t nb[4], int cells_axis) {
    std::vector<axis> axes;
    cells = { ne[cells_axis], nb[cells_axis] };
    for (int i = 0; i < 4; i++) {
        if (ne[i] != 1 || i == cells_axis) {
            axes.push_back({ ne[i], nb[i] });
        }
    }
    std::sort(axes.begin(), axes.end(), [](const axis & a, const axis & b) { return a.nb > b.nb; });
    n_outer = 0;
    for (size_t i = 0; i + 1 < axes.size(); i++) {
        if (axes[i + 1].nb == 0 || axes[i].nb % axes[i + 1].nb != 0 ||
            axes[i].nb < (uint64_t) axes[i + 1].ne * axes[i + 1].nb) {
            return false;
        }
    }
    for (size_t i = 0; i < axes.size() && axes[i].nb > cells.nb; i++) {
        outer[n_outer++] = axes[i];
    }
    return cells.nb != 0;
}

int64_t neuron_cell_map::cell_of(int64_t row) const {
    int64_t at = offset + row * (int64_t) row_stride;
    if (at < 0) {
        return at + (int64_t) row_size <= 0 ? NONE : SEVERAL;
    }
    bool beyond = false;
    for (size_t i = 0; i < n_outer; i++) {
        beyond = beyond || at / (int64_t) outer[i].nb >= outer[i].ne;
        at %= (int64_t) outer[i].nb;
    }
    if (at % (int64_t) cells.nb + (int64_t) row_size > (int64_t) cells.nb) {
        return SEVERAL;
    }
    const int64_t cell = at / (int64_t) cells.nb;
    return beyond || cell >= cells.ne ? NONE : cell;
}

bool neuron_cell_map::operator==(const neuron_cell_map & other) const {
    return offset == other.offset && row_stride == other.row_stride && row_size == other.row_size &&
           cells == other.cells && n_outer == other.n_outer &&
           std::equal(outer.begin(), outer.begin() + (std::ptrdiff_t) n_outer, other.outer.begin());
}

bool neuron_causal_condition::operator==(const neuron_causal_condition & other) const {
    return rows == other.rows && mask == other.mask && cells == other.cells &&
           std::equal(pieces.begin(), pieces.end(), other.pieces.begin(), other.pieces.end(),
                      [](const neuron_range & a, const neuron_range & b) { return a.first == b.first && a.n == b.n; });
}

bool neuron_hidden_condition::operator==(const neuron_hidden_condition & other) const {
    return mask == other.mask && tokens.first == other.tokens.first && tokens.n == other.tokens.n &&
           kernel.n_tokens == other.kernel.n_tokens && kernel.n_cells == other.kernel.n_cells;
}

static bool is_known(const ggml_tensor * t, std::initializer_list<ggml_type> types, int n_dims) {
    return std::find(types.begin(), types.end(), t->type) != types.end() && ggml_n_dims(t) <= n_dims &&
           t->nb[0] == ggml_type_size(t->type);
}

bool neuron_can_read_rows(const ggml_tensor * rows) {
    return is_known(rows, { GGML_TYPE_I32, GGML_TYPE_I64 }, 1);
}

bool neuron_can_tell_causality(const ggml_tensor * rows, const ggml_tensor * mask) {
    return neuron_can_read_rows(rows) && neuron_can_read_mask(mask) && rows->ne[0] % mask->ne[1] == 0;
}

bool neuron_can_read_mask(const ggml_tensor * mask) {
    return is_known(mask, { GGML_TYPE_F16, GGML_TYPE_F32 }, 2);
}

// numbers of FLASH_ATTN_EXT's sources
static constexpr size_t Q = 0, K = 1;

bool neuron_may_be_causal(const ggml_tensor * node) {
    return node->op == GGML_OP_FLASH_ATTN_EXT && node->src[NEURON_FLASH_ATTN_MASK] &&
           node->op_params[2 * NEURON_CAUSAL_WORD + 1] == 0;
}

neuron_causal_kernel::neuron_causal_kernel(const neuron_key_node & node) {
    const bool attends = node.op == neuron_key_ops::get().flash_attn_ext && node.inputs.size() > NEURON_FLASH_ATTN_MASK;
    if (attends && (node.params[NEURON_CAUSAL_WORD] & NEURON_CAUSAL_BIT)) {
        n_tokens = (int64_t) node.inputs[Q].tensor[2];
        n_cells  = (int64_t) node.inputs[K].tensor[2];
    }
}

static int64_t row_at(const ggml_tensor * rows, const uint8_t * data, int64_t i) {
    if (rows->type == GGML_TYPE_I64) {
        int64_t row;
        memcpy(&row, data + (size_t) i * sizeof(row), sizeof(row));
        return row;
    }
    int32_t row;
    memcpy(&row, data + (size_t) i * sizeof(row), sizeof(row));
    return row;
}

bool neuron_are_rows_among(const neuron_row_condition & condition, const uint8_t * data) {
    const neuron_range all     = { 0, condition.rows->ne[0] };
    const neuron_range numbers = condition.numbers.n ? condition.numbers : all;
    for (int64_t i = numbers.first; i < numbers.first + numbers.n; i++) {
        const int64_t row = row_at(condition.rows, data, i);
        if (row < condition.first || row - condition.first >= condition.n) {
            return false;
        }
    }
    return true;
}

// Sets element i of an array of numbers of a type.
static void set_number(std::vector<uint8_t> & numbers, enum ggml_type type, int64_t i, int64_t number) {
    const size_t size = ggml_type_size(type);
    const auto   half = (int32_t) number;  // for I32
    memcpy(&numbers[(size_t) i * size], type == GGML_TYPE_I64 ? (const void *) &number : &half, size);
}

std::vector<uint8_t> neuron_rows_from(const ggml_tensor * rows,
                                      const uint8_t *     data,
                                      int64_t             first,
                                      int64_t             own,
                                      int64_t             n) {
    std::vector<uint8_t> numbers((size_t) n * ggml_type_size(rows->type));
    for (int64_t i = 0; i < n; i++) {
        set_number(numbers, rows->type, i, row_at(rows, data, i % own) - first);
    }
    return numbers;
}

std::vector<uint8_t> neuron_renamed_rows(const ggml_tensor *   rows,
                                         const uint8_t *       data,
                                         const neuron_blocks & named,
                                         bool                  in_blocks,
                                         int64_t               n) {
    const auto           own    = (int64_t) named.own;
    const auto           kernel = (int64_t) named.kernel;
    std::vector<uint8_t> numbers((size_t) n * ggml_type_size(rows->type));
    for (int64_t i = 0; i < n; i++) {
        const int64_t at  = in_blocks ? i / kernel * own + i % kernel % own : i % rows->ne[0];
        const int64_t row = row_at(rows, data, at);
        set_number(numbers, rows->type, i, row / own * kernel + row % own);
    }
    return numbers;
}

// Returns whether an element of a mask is -inf.
static bool hides(const ggml_tensor * mask, const uint8_t * row, int64_t column) {
    if (mask->type == GGML_TYPE_F16) {
        uint16_t half;
        memcpy(&half, row + (size_t) column * sizeof(half), sizeof(half));
        return half == 0xFC00;
    }
    float value;
    memcpy(&value, row + (size_t) column * sizeof(value), sizeof(value));
    return value == -INFINITY;
}

bool neuron_is_hidden(const neuron_hidden_condition & condition, const uint8_t * mask) {
    const int64_t n = std::min(condition.tokens.n, condition.mask->ne[1] - condition.tokens.first);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t * row = mask + (size_t) (condition.tokens.first + i) * condition.mask->nb[1];
        for (int64_t cell = condition.kernel.seen(i); cell < condition.mask->ne[0]; cell++) {
            if (!hides(condition.mask, row, cell)) {
                return false;
            }
        }
    }
    return true;
}

bool neuron_is_causal(const neuron_causal_condition & condition, const uint8_t * rows, const uint8_t * mask) {
    const int64_t        n         = condition.mask->ne[1];
    const int64_t        per_token = condition.rows->ne[0] / n;
    std::vector<int64_t> last((size_t) condition.cells.cells.ne,
                              -1);  // for each cell, the last token that writes to it
    for (int64_t token = 0; token < n; token++) {
        for (int64_t i = 0; i < per_token; i++) {
            const int64_t cell = condition.cells.cell_of(row_at(condition.rows, rows, token * per_token + i));
            if (cell == neuron_cell_map::SEVERAL) {
                return false;
            }
            if (cell != neuron_cell_map::NONE) {
                last[(size_t) cell] = token;
            }
        }
    }
    std::vector<std::pair<int64_t, int64_t>> cells;  // the written cells, and their tokens
    for (size_t cell = 0; cell < last.size(); cell++) {
        if (last[cell] >= 0) {
            cells.emplace_back((int64_t) cell, last[cell]);
        }
    }
    std::sort(cells.begin(), cells.end(), [](const auto & a, const auto & b) { return a.second > b.second; });
    for (const neuron_range & piece : condition.pieces) {
        const int64_t end = piece.first + piece.n;
        const auto later  = std::find_if(cells.begin(), cells.end(), [end](const auto & c) { return c.second < end; });
        for (int64_t token = piece.first; token < end; token++) {
            const uint8_t * row = mask + (size_t) token * condition.mask->nb[1];
            if (!std::all_of(cells.begin(), later,
                             [&](const auto & c) { return hides(condition.mask, row, c.first); })) {
                return false;
            }
        }
    }
    return true;
}
