#include "weights/layouts.h"

#include "ggml-backend-impl.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr size_t MAX_FIELDS = 5;

// Bytes of the fields of a type's blocks; 0 after the last. The same table as in tools/kernelgen/ggml/weight_layouts.py; a test
// compares the two.
struct block_fields {
    enum ggml_type type;
    uint8_t        bytes[MAX_FIELDS];
};

constexpr block_fields FIELDS[] = {
    { GGML_TYPE_Q4_0,    { 2, 16 }             },
    { GGML_TYPE_Q4_1,    { 2, 2, 16 }          },
    { GGML_TYPE_Q5_0,    { 2, 4, 16 }          },
    { GGML_TYPE_Q5_1,    { 2, 2, 4, 16 }       },
    { GGML_TYPE_Q8_0,    { 2, 32 }             },
    { GGML_TYPE_Q2_K,    { 16, 64, 2, 2 }      },
    { GGML_TYPE_Q3_K,    { 32, 64, 12, 2 }     },
    { GGML_TYPE_Q4_K,    { 2, 2, 12, 128 }     },
    { GGML_TYPE_Q5_K,    { 2, 2, 12, 32, 128 } },
    { GGML_TYPE_Q6_K,    { 128, 64, 16, 2 }    },
    { GGML_TYPE_IQ2_XXS, { 2, 64 }             },
    { GGML_TYPE_IQ2_XS,  { 2, 64, 8 }          },
    { GGML_TYPE_IQ3_XXS, { 2, 64, 32 }         },
    { GGML_TYPE_IQ1_S,   { 2, 32, 16 }         },
    { GGML_TYPE_IQ4_NL,  { 2, 16 }             },
    { GGML_TYPE_IQ3_S,   { 2, 64, 8, 32, 4 }   },
    { GGML_TYPE_IQ2_S,   { 2, 32, 32, 8, 8 }   },
    { GGML_TYPE_IQ4_XS,  { 2, 2, 4, 128 }      },
    { GGML_TYPE_IQ1_M,   { 32, 16, 8 }         },
    { GGML_TYPE_TQ1_0,   { 48, 4, 2 }          },
    { GGML_TYPE_TQ2_0,   { 64, 2 }             },
    { GGML_TYPE_MXFP4,   { 1, 16 }             },
    { GGML_TYPE_NVFP4,   { 4, 32 }             },
    { GGML_TYPE_Q1_0,    { 2, 16 }             },
    { GGML_TYPE_Q2_0,    { 2, 16 }             },
};

const block_fields * fields_of(enum ggml_type type) {
    const auto * found =
        std::find_if(std::begin(FIELDS), std::end(FIELDS), [type](const block_fields & f) { return f.type == type; });
    return found == std::end(FIELDS) ? nullptr : found;
}

// Returns the layout of a tensor that is not a view in buffers of a type.
int32_t layout_in(ggml_backend_buffer_type_t buft, const ggml_tensor * root) {
    const int32_t layout = neuron_layout_of_buft(buft);
    return neuron_has_layout(root->type, layout) && ggml_is_contiguous(root) ? layout : 0;
}

// Returns the layout of a tensor that is not a view. It stays the same while the tensor has its buffer.
int32_t layout_of_root(const ggml_tensor * root) {
    return root->buffer ? layout_in(root->buffer->buft, root) : 0;
}

// Bytes of what is stored by itself, as ggml has it.
size_t unit_of(const ggml_tensor * root, int32_t layout) {
    return layout == NEURON_KERNELS_FORM_TRANSPOSED ? root->nb[2] : root->nb[1];
}

// Bytes of a row in the layout bf16.
size_t bf16_row(const ggml_tensor * root) {
    return ggml_row_size(GGML_TYPE_BF16, root->ne[0]);
}

// Returns whether a view is of whole units, each as it is: then it has its root's layout.
bool has_whole_units(const ggml_tensor * view, const ggml_tensor * root, int32_t layout) {
    const size_t unit  = unit_of(root, layout);
    const int    outer = layout == NEURON_KERNELS_FORM_TRANSPOSED ? 2 : 1;
    if (view->type != root->type || view->view_offs % unit != 0 || view->nb[0] != root->nb[0] ||
        view->ne[0] != root->ne[0]) {
        return false;
    }
    if (outer == 2 && (view->ne[1] != root->ne[1] || view->nb[1] != root->nb[1])) {
        return false;
    }
    for (int i = outer; i < GGML_MAX_DIMS; i++) {
        if (view->ne[i] > 1 && view->nb[i] % unit != 0) {
            return false;
        }
    }
    return true;
}

// Copies a field of all blocks of a row: `from` and `to` have it at distances of their own.
void copy_field(const uint8_t * from, size_t from_step, uint8_t * to, size_t to_step, size_t bytes, size_t n_blocks) {
    for (size_t i = 0; i < n_blocks; i++) {
        memcpy(to + i * to_step, from + i * from_step, bytes);
    }
}

// Writes the transpose of a matrix of `rows` by `columns`, in tiles that a cache holds.
template <typename T> void transpose(const uint8_t * from, uint8_t * to, size_t rows, size_t columns) {
    constexpr size_t TILE = 32;
    for (size_t r0 = 0; r0 < rows; r0 += TILE) {
        for (size_t c0 = 0; c0 < columns; c0 += TILE) {
            for (size_t r = r0; r < std::min(r0 + TILE, rows); r++) {
                for (size_t c = c0; c < std::min(c0 + TILE, columns); c++) {
                    memcpy(to + (c * rows + r) * sizeof(T), from + (r * columns + c) * sizeof(T), sizeof(T));
                }
            }
        }
    }
}

}  // namespace

const char * neuron_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    return ((neuron_buffer_type_context *) buft->context)->name.c_str();
}

int32_t neuron_layout_of_buft(ggml_backend_buffer_type_t buft) {
    const bool own = buft->iface.get_name == neuron_buffer_type_get_name;
    return own ? ((neuron_buffer_type_context *) buft->context)->layout : 0;
}

bool neuron_has_layout(enum ggml_type type, int32_t layout) {
    switch (layout) {
        case NEURON_KERNELS_FORM_PLANES:
        case NEURON_KERNELS_FORM_BF16:
            return fields_of(type) != nullptr;
        case NEURON_KERNELS_FORM_TRANSPOSED:
            return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
        default:
            return false;
    }
}

bool neuron_is_permutation(int32_t layout) {
    return layout != NEURON_KERNELS_FORM_BF16;
}

size_t neuron_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    const size_t size = ggml_nbytes(t);
    return layout_in(buft, t) == NEURON_KERNELS_FORM_BF16 ? std::max(size, bf16_row(t) * (size_t) ggml_nrows(t)) : size;
}

const char * neuron_layout_name(int32_t layout) {
    switch (layout) {
        case NEURON_KERNELS_FORM_PLANES:
            return "planes";
        case NEURON_KERNELS_FORM_TRANSPOSED:
            return "transposed";
        case NEURON_KERNELS_FORM_BF16:
            return "bf16";
        default:
            return "scattered";
    }
}

enum ggml_type neuron_plain_type(int32_t type) {
    return (enum ggml_type)(type & ((1 << NEURON_KERNELS_FORM_SHIFT) - 1));
}

int32_t neuron_type_in_layout(enum ggml_type type, int32_t layout) {
    return (int32_t) type | layout << NEURON_KERNELS_FORM_SHIFT;
}

int32_t neuron_type_of(const ggml_tensor * t) {
    const ggml_tensor * root   = neuron_root_of(t);
    const int32_t       layout = layout_of_root(root);
    if (layout == 0) {
        return t->type;
    }
    const bool whole = t == root || has_whole_units(t, root, layout);
    return neuron_type_in_layout(t->type, whole ? layout : NEURON_LAYOUT_SCATTERED);
}

neuron_layout::neuron_layout(const ggml_tensor * t) : root(neuron_root_of(t)), layout(layout_of_root(root)) {
    if (layout) {
        unit_size = unit_of(root, layout);
    }
}

template <bool PACK> void neuron_layout::permute(const uint8_t * from, uint8_t * to, size_t n_units) const {
    const auto rows    = (size_t) root->ne[1];
    const auto columns = (size_t) root->ne[0];
    for (size_t i = 0; i < n_units; i++, from += unit_size, to += unit_size) {
        if (layout == NEURON_KERNELS_FORM_TRANSPOSED) {
            const auto move = ggml_type_size(root->type) == 4 ? transpose<uint32_t> : transpose<uint16_t>;
            move(from, to, PACK ? rows : columns, PACK ? columns : rows);
            continue;
        }
        const size_t size     = ggml_type_size(root->type);
        const size_t n_blocks = unit_size / size;
        size_t       begin    = 0;  // of the field in a block
        for (const size_t bytes : fields_of(root->type)->bytes) {
            const size_t plane = begin * n_blocks;
            if (PACK) {
                copy_field(from + begin, size, to + plane, bytes, bytes, n_blocks);
            } else {
                copy_field(from + plane, bytes, to + begin, size, bytes, n_blocks);
            }
            begin += bytes;
        }
    }
}

size_t neuron_layout::stored_unit() const {
    return layout == NEURON_KERNELS_FORM_BF16 ? bf16_row(root) : unit_size;
}

void neuron_layout::pack(const uint8_t * from, uint8_t * to, size_t n_units) const {
    if (is_permutation()) {
        permute<true>(from, to, n_units);
        return;
    }
    const auto         to_float = ggml_get_type_traits(root->type)->to_float;
    std::vector<float> row((size_t) root->ne[0]);
    for (size_t i = 0; i < n_units; i++) {
        to_float(from + i * unit_size, row.data(), root->ne[0]);
        ggml_fp32_to_bf16_row(row.data(), (ggml_bf16_t *) (to + i * stored_unit()), root->ne[0]);
    }
}

void neuron_layout::unpack(const uint8_t * from, uint8_t * to, size_t n_units) const {
    permute<false>(from, to, n_units);
}
