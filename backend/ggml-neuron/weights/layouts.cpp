#include "weights/layouts.h"

#include "ggml-backend-impl.h"
#include "report/environment.h"
#include "select/tensors.h"
#include "weights/threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t MAX_FIELDS = 5;

// Bytes of the fields of a type's blocks; 0 after the last. tools/kernelgen/ggml/weight_layouts.py has the same table;
// a test compares the two.
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

// Returns the layout of a tensor that is not a view, in buffers of a type.
int32_t layout_in(ggml_backend_buffer_type_t buft, const ggml_tensor * root) {
    const int32_t layout = neuron_layout_of_buft(buft);
    return neuron_has_layout(root->type, layout) && ggml_is_contiguous(root) ? layout : 0;
}

// Returns the layout of a tensor that is not a view. It stays the same while the tensor has its buffer.
int32_t layout_of_root(const ggml_tensor * root) {
    return root->buffer ? layout_in(root->buffer->buft, root) : 0;
}

// Returns whether a layout stores each matrix separately; others store each row separately.
bool stores_matrices(int32_t layout) {
    return layout == NEURON_KERNELS_FORM_TRANSPOSED || layout == NEURON_KERNELS_FORM_F8_E4M3_128X128;
}

// Returns the bytes of a unit in ggml's order.
size_t unit_of(const ggml_tensor * root, int32_t layout) {
    return stores_matrices(layout) ? root->nb[2] : root->nb[1];
}

// Returns the bytes of a row in the layout bf16.
size_t bf16_row(const ggml_tensor * root) {
    return ggml_row_size(GGML_TYPE_BF16, root->ne[0]);
}

constexpr size_t F8_TILE = 128;  // rows and columns per scale
constexpr float  F8_MAX  = 240;  // the largest e4m3 number of every target

size_t n_tiles(int64_t n) {
    return ((size_t) n + F8_TILE - 1) / F8_TILE;
}

// Returns the bytes of the codes of a matrix in the layout f8_e4m3_128x128: whole tiles of columns, each column of ne1
// codes.
size_t f8_codes(const ggml_tensor * root) {
    return n_tiles(root->ne[0]) * F8_TILE * (size_t) root->ne[1];
}

// Returns the bytes of a unit in a layout.
size_t stored_unit_of(const ggml_tensor * root, int32_t layout) {
    switch (layout) {
        case NEURON_KERNELS_FORM_BF16:
            return bf16_row(root);
        case NEURON_KERNELS_FORM_F8_E4M3_128X128:
            return f8_codes(root) + n_tiles(root->ne[0]) * n_tiles(root->ne[1]) * sizeof(float);
        default:
            return unit_of(root, layout);
    }
}

// Returns the e4m3 code nearest to a number of at most F8_MAX; a tie goes to the even code.
uint8_t e4m3_of(float x) {
    constexpr uint32_t MANTISSA = 20;  // bits of a float's mantissa that e4m3 lacks
    uint32_t           bits;
    memcpy(&bits, &x, sizeof(bits));
    const auto sign = (uint8_t) (bits >> 24 & 0x80);
    x               = std::fabs(x);
    if (x < 0x1p-6f) {  // subnormal: steps of 2^-9
        return (uint8_t) (sign | (uint8_t) std::lrint(x * 0x1p9f));
    }
    bits &= 0x7fffffff;
    bits += (1u << (MANTISSA - 1)) - 1 + (bits >> MANTISSA & 1);
    return (uint8_t) (sign | (uint8_t) ((bits >> MANTISSA) - ((127 - 7) << 3)));
}

// Writes the codes of a tile column by column, `step` apart, and returns its scale. The scale of a tile with a
// non-finite element is NaN.
float pack_tile(const float * from, size_t row_step, size_t n_rows, size_t n_columns, uint8_t * to, size_t step) {
    float largest = 0;
    bool  finite  = true;
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_columns; c++) {
            const float x = std::fabs(from[r * row_step + c]);
            finite        = finite && x <= std::numeric_limits<float>::max();
            largest       = std::max(largest, x);
        }
    }
    const float scale = finite ? largest / F8_MAX : std::numeric_limits<float>::quiet_NaN();
    const bool  codes = scale > 0;  // with a scale of 0 or NaN all codes are 0
    for (size_t c = 0; c < n_columns; c++) {
        for (size_t r = 0; r < n_rows; r++) {
            const float x    = codes ? from[r * row_step + c] / scale : 0.0f;
            to[c * step + r] = e4m3_of(std::min(std::max(x, -F8_MAX), F8_MAX));
        }
    }
    return scale;
}

// Packs the row of tiles that begins with row `r` of a matrix in the layout f8_e4m3_128x128. The first one also packs
// the columns that pad the last tile. `some` is work memory for elements.
void pack_f8(const ggml_tensor * root, const uint8_t * from, uint8_t * to, size_t r, std::vector<float> & some) {
    const auto   columns  = (size_t) root->ne[0];
    const auto   rows     = (size_t) root->ne[1];
    const size_t codes    = f8_codes(root);
    const size_t n_rows   = std::min(F8_TILE, rows - r);
    const auto   to_float = ggml_get_type_traits(root->type)->to_float;
    some.resize(n_rows * columns);
    if (r == 0) {
        memset(to + columns * rows, 0, codes - columns * rows);
    }
    for (size_t i = 0; i < n_rows; i++) {
        to_float(from + (r + i) * root->nb[1], some.data() + i * columns, root->ne[0]);
    }
    for (size_t c = 0; c < columns; c += F8_TILE) {
        const float scale =
            pack_tile(some.data() + c, columns, n_rows, std::min(F8_TILE, columns - c), to + c * rows + r, rows);
        const size_t tile = c / F8_TILE * n_tiles(root->ne[1]) + r / F8_TILE;
        memcpy(to + codes + tile * sizeof(float), &scale, sizeof(float));
    }
}

// Returns whether a view consists of whole, unchanged units: then it has its root's layout.
bool has_whole_units(const ggml_tensor * view, const ggml_tensor * root, int32_t layout) {
    const size_t unit  = unit_of(root, layout);
    const int    outer = stores_matrices(layout) ? 2 : 1;
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

// Copies a field of all blocks of a row. `from_step` and `to_step` are the distances of its elements.
void copy_field(const uint8_t * from, size_t from_step, uint8_t * to, size_t to_step, size_t bytes, size_t n_blocks) {
    for (size_t i = 0; i < n_blocks; i++) {
        memcpy(to + i * to_step, from + i * from_step, bytes);
    }
}

// Rows of a matrix that are transposed at once.
constexpr size_t BAND = 128;

// Writes the transpose of the band that begins with row `r` of a matrix of `rows` by `columns`, in tiles that fit a CPU
// cache.
template <typename T> void transpose(const uint8_t * from, uint8_t * to, size_t rows, size_t columns, size_t r) {
    constexpr size_t TILE = 32;
    const size_t     end  = std::min(r + BAND, rows);
    for (size_t r0 = r; r0 < end; r0 += TILE) {
        for (size_t c0 = 0; c0 < columns; c0 += TILE) {
            for (size_t i = r0; i < std::min(r0 + TILE, end); i++) {
                for (size_t c = c0; c < std::min(c0 + TILE, columns); c++) {
                    memcpy(to + (c * rows + i) * sizeof(T), from + (i * columns + c) * sizeof(T), sizeof(T));
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
        case NEURON_KERNELS_FORM_F8_E4M3_128X128:
            return fields_of(type) != nullptr || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
        default:
            return false;
    }
}

bool neuron_is_permutation(int32_t layout) {
    return layout != NEURON_KERNELS_FORM_BF16 && layout != NEURON_KERNELS_FORM_F8_E4M3_128X128;
}

size_t neuron_repack_threads() {
    static const size_t n = [] {
        constexpr size_t  MOST       = 1024;
        const size_t      processors = std::max(std::thread::hardware_concurrency(), 1u);
        const std::string what       = "a number from 1 to " + std::to_string(MOST);
        return neuron_number("GGML_NEURON_REPACK_THREADS", what.c_str(), 1, MOST, std::min(processors, MOST));
    }();
    return n;
}

size_t neuron_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    const size_t  size   = ggml_nbytes(t);
    const int32_t layout = layout_in(buft, t);
    if (neuron_is_permutation(layout) || size == 0) {
        return size;
    }
    return std::max(size, size / unit_of(t, layout) * stored_unit_of(t, layout));
}

const char * neuron_layout_name(int32_t layout) {
    switch (layout) {
        case NEURON_KERNELS_FORM_PLANES:
            return "planes";
        case NEURON_KERNELS_FORM_TRANSPOSED:
            return "transposed";
        case NEURON_KERNELS_FORM_BF16:
            return "bf16";
        case NEURON_KERNELS_FORM_F8_E4M3_128X128:
            return "f8_e4m3_128x128";
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

template <bool PACK> void neuron_layout::permute(const uint8_t * from, uint8_t * to, size_t first, size_t last) const {
    const auto   rows    = (size_t) root->ne[PACK ? 1 : 0];
    const auto   columns = (size_t) root->ne[PACK ? 0 : 1];
    const size_t parts   = n_parts(PACK);
    for (size_t i = first; i < last; i++) {
        const size_t at = i / parts * unit_size;
        if (layout == NEURON_KERNELS_FORM_TRANSPOSED) {
            const auto move = ggml_type_size(root->type) == 4 ? transpose<uint32_t> : transpose<uint16_t>;
            move(from + at, to + at, rows, columns, i % parts * BAND);
            continue;
        }
        const size_t size     = ggml_type_size(root->type);
        const size_t n_blocks = unit_size / size;
        size_t       begin    = 0;  // of the field in a block
        for (const size_t bytes : fields_of(root->type)->bytes) {
            const size_t plane = begin * n_blocks;
            if (PACK) {
                copy_field(from + at + begin, size, to + at + plane, bytes, bytes, n_blocks);
            } else {
                copy_field(from + at + plane, bytes, to + at + begin, size, bytes, n_blocks);
            }
            begin += bytes;
        }
    }
}

size_t neuron_layout::stored_unit() const {
    return stored_unit_of(root, layout);
}

size_t neuron_layout::n_parts(bool packs) const {
    switch (layout) {
        case NEURON_KERNELS_FORM_TRANSPOSED:
            return ((size_t) root->ne[packs ? 1 : 0] + BAND - 1) / BAND;
        case NEURON_KERNELS_FORM_F8_E4M3_128X128:
            return n_tiles(root->ne[1]);
        default:
            return 1;
    }
}

void neuron_layout::pack_parts(const uint8_t * from, uint8_t * to, size_t first, size_t last) const {
    if (is_permutation()) {
        permute<true>(from, to, first, last);
        return;
    }
    const auto         to_float = ggml_get_type_traits(root->type)->to_float;
    const size_t       parts    = n_parts(true);
    std::vector<float> some((size_t) root->ne[0]);
    for (size_t i = first; i < last; i++) {
        const uint8_t * unit   = from + i / parts * unit_size;
        uint8_t *       stored = to + i / parts * stored_unit();
        if (layout == NEURON_KERNELS_FORM_F8_E4M3_128X128) {
            pack_f8(root, unit, stored, i % parts * F8_TILE, some);
        } else {
            to_float(unit, some.data(), root->ne[0]);
            ggml_fp32_to_bf16_row(some.data(), (ggml_bf16_t *) stored, root->ne[0]);
        }
    }
}

void neuron_layout::pack(const uint8_t * from, uint8_t * to, size_t n_units) const {
    neuron_in_threads(n_units * n_parts(true), n_units * unit_size,
                      [this, from, to](size_t first, size_t last) { pack_parts(from, to, first, last); });
}

void neuron_layout::unpack(const uint8_t * from, uint8_t * to, size_t n_units) const {
    neuron_in_threads(n_units * n_parts(false), n_units * unit_size,
                      [this, from, to](size_t first, size_t last) { permute<false>(from, to, first, last); });
}
