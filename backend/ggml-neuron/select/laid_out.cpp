#include "select/laid_out.h"

#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "ggml-backend.h"
#include "select/causality.h"
#include "select/key_nodes.h"
#include "select/tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

//
// bytes
//

static bool is_missing(const neuron_kernels_tensor & t) {
    return t.type == NEURON_KERNELS_ABSENT;
}

static size_t element_size(const neuron_kernels_tensor & t) {
    return nk::find_type(t.type)->size;
}

static bool is_laid_as(const neuron_kernels_tensor & a, const neuron_kernels_tensor & b) {
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (a.ne[i] != b.ne[i] || (a.ne[i] != 1 && a.nb[i] != b.nb[i])) {
            return false;
        }
    }
    return a.type == b.type;
}

bool neuron_laid::operator==(const neuron_laid & other) const {
    return is_laid_as(own, other.own) && is_laid_as(kernel, other.kernel) && hides == other.hides &&
           is_read == other.is_read;
}

// Calls a function for each stretch of elements that both tensors have: with the byte offsets in both, and the number
// of bytes.
template <typename F>
static void for_each_stretch(const neuron_kernels_tensor & a, const neuron_kernels_tensor & b, F function) {
    const size_t           element = element_size(a);
    std::array<int64_t, 4> ne;
    std::copy(a.ne, a.ne + GGML_MAX_DIMS, ne.begin());
    size_t stretch = element;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (ne[(size_t) i] > 1 && a.nb[i] == element && b.nb[i] == element) {
            stretch        = element * (size_t) ne[(size_t) i];
            ne[(size_t) i] = 1;
            break;
        }
    }
    for (int64_t i3 = 0; i3 < ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < ne[1]; i1++) {
                for (int64_t i0 = 0; i0 < ne[0]; i0++) {
                    const auto at = [&](const neuron_kernels_tensor & t) {
                        return (size_t) i0 * t.nb[0] + (size_t) i1 * t.nb[1] + (size_t) i2 * t.nb[2] +
                               (size_t) i3 * t.nb[3];
                    };
                    function(at(a), at(b), stretch);
                }
            }
        }
    }
}

std::vector<uint8_t> neuron_laid::lay_out(const uint8_t * data) const {
    std::vector<uint8_t> made(neuron_nbytes(kernel));
    if (hides) {
        const bool  half   = kernel.type == GGML_TYPE_F16;
        const float masked = -INFINITY;
        const auto  same   = (ggml_fp16_t) 0xFC00;                                     // F16
        for (size_t at = 0; at < made.size(); at += element_size(kernel)) {
            const auto column = (int64_t) (at / element_size(kernel)) % kernel.ne[0];  // it has no gaps
            if (column >= own.ne[0]) {
                memcpy(&made[at], half ? (const void *) &same : &masked, element_size(kernel));
            }
        }
    }
    for_each_stretch(own, kernel, [&](size_t from, size_t to, size_t n) { memcpy(&made[to], data + from, n); });
    return made;
}

void neuron_laid::take_back(const uint8_t * data, uint8_t * own_data) const {
    for_each_stretch(own, kernel, [&](size_t to, size_t from, size_t n) { memcpy(own_data + to, data + from, n); });
}

//
// rules
//

namespace {

// The axes along which a kernel may be longer than a node, as bits: for each source and then for the result.
struct open_axes {
    uint8_t of[GGML_MAX_SRC + 1] = {};
    int     mask                 = -1;  // the source that hides columns beyond its own
    bool    is_possible          = false;
};

}  // namespace

static constexpr uint8_t ROWS_AND_COLUMNS = 1 << 0 | 1 << 1;

static bool has_same_extents(const neuron_kernels_tensor & a, const neuron_kernels_tensor & b) {
    return std::equal(a.ne, a.ne + GGML_MAX_DIMS, b.ne);
}

static bool may_be_laid_out(const neuron_kernels_tensor & t) {
    return is_missing(t) || t.type == GGML_TYPE_F32 || t.type == GGML_TYPE_F16 || t.type == GGML_TYPE_BF16;
}

// Copies of any rows and columns, or of a token's heads that are placed side by side.
static bool open_copies(const neuron_signature & s, open_axes & open) {
    const neuron_kernels_tensor & from = s.tensors[0];
    const neuron_kernels_tensor & to   = s.tensors[s.n_src];
    if (has_same_extents(from, to)) {
        std::fill(open.of, open.of + s.n_src + 1, ROWS_AND_COLUMNS);
        return true;
    }
    std::fill(open.of, open.of + s.n_src + 1, (uint8_t) (1 << 1));
    open.of[0] = 1 << 2;
    return from.ne[3] == 1 && to.ne[0] == from.ne[0] * from.ne[1] && to.ne[1] == from.ne[2] && to.ne[2] == 1;
}

// Returns whether a mask has a column for each key that it hides, and no gaps.
static bool hides_all(const neuron_signature & s, const open_axes & open) {
    const bool                    scores = s.op_hash == neuron_key_ops::get().soft_max;
    const neuron_kernels_tensor & mask   = s.tensors[open.mask];
    const size_t                  dense  = (size_t) (mask.ne[0] * mask.ne[1] * mask.ne[2] * mask.ne[3]);
    return mask.ne[0] == (scores ? s.tensors[0].ne[0] : s.tensors[1].ne[1]) &&
           neuron_nbytes(mask) == dense * element_size(mask);
}

// Returns the axes along which the kernel may be longer.
static open_axes find_open(const neuron_signature & s) {
    const neuron_key_ops & ops = neuron_key_ops::get();
    open_axes              open;
    if (s.op_hash == ops.mul_mat) {
        std::fill(open.of, open.of + 3, ROWS_AND_COLUMNS);
        open.is_possible = s.n_src == 2;
    } else if (s.op_hash == ops.soft_max) {
        open.of[0] = open.of[NEURON_SOFT_MAX_MASK] = open.of[s.n_src] = ROWS_AND_COLUMNS;
        open.mask        = s.n_src > 1 && !is_missing(s.tensors[NEURON_SOFT_MAX_MASK]) ? NEURON_SOFT_MAX_MASK : -1;
        open.is_possible = open.mask >= 0;
    } else if (s.op_hash == ops.flash_attn_ext) {
        open.of[0] = open.of[1] = open.of[2] = 1 << 1;
        open.of[NEURON_FLASH_ATTN_MASK]      = ROWS_AND_COLUMNS;
        open.of[s.n_src]                     = 1 << 2;
        open.mask                            = NEURON_FLASH_ATTN_MASK;
        open.is_possible                     = s.n_src > open.mask && !is_missing(s.tensors[open.mask]);
    } else if (ops.copies(s.op_hash)) {
        open.is_possible = open_copies(s, open);
    } else if (s.op_hash == ops.add || s.op_hash == ops.scale || s.op_hash == ops.tanh) {
        // scores, of several heads
        std::fill(open.of, open.of + s.n_src + 1, ROWS_AND_COLUMNS);
        open.is_possible = s.tensors[s.n_src].ne[2] > 1;
        for (int i = 0; i < s.n_src; i++) {
            open.is_possible = open.is_possible && has_same_extents(s.tensors[i], s.tensors[s.n_src]);
        }
    }
    for (int i = 0; i <= s.n_src; i++) {
        open.is_possible = open.is_possible && may_be_laid_out(s.tensors[i]);
    }
    open.is_possible = open.is_possible && (open.mask < 0 || hides_all(s, open));
    return open;
}

// Returns a hash of the properties that a node shares with the kernels for which it may be laid out.
static uint64_t laid_out_family(const neuron_signature & s, const open_axes & open) {
    nk::word_hash h;
    h.add(s.op_hash);
    h.add((uint64_t) s.n_src << 32 | (uint32_t) s.alias);
    h.add((uint64_t) open.mask << 8 | open.of[0]);
    for (int i = 0; i <= s.n_src; i++) {
        const neuron_kernels_tensor & t = s.tensors[i];
        h.add((uint64_t) t.type);
        for (int axis = 0; axis < GGML_MAX_DIMS && !is_missing(t); axis++) {
            h.add(open.of[i] >> axis & 1 ? 0 : (uint64_t) t.ne[axis]);
        }
    }
    return h.value();
}

bool neuron_is_of_call(const ggml_tensor * t) {
    const ggml_tensor *         root   = neuron_root_of(t);
    const ggml_backend_buffer_t buffer = root->buffer;
    if (!buffer) {  // no memory is allocated yet
        return root->op != GGML_OP_NONE || (root->flags & GGML_TENSOR_FLAG_INPUT) != 0;
    }
    return ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// Returns whether a node's source is the node itself, as ggml_cast makes it.
static bool is_own_result(const ggml_tensor * op, int src) {
    return op->src[src] == op;
}

// Returns whether a kernel computes a node after its tensors are laid out, and sets their layouts.
static bool fit_laid_out(const ggml_tensor *      op,
                         const neuron_signature & node,
                         const neuron_signature & kernel,
                         const open_axes &        open,
                         neuron_layout_of_node &  layout) {
    bool longer = false;
    layout.assign((size_t) node.n_src + 1, {});
    for (int i = 0; i <= node.n_src; i++) {
        const neuron_kernels_tensor & a = node.tensors[i];
        const neuron_kernels_tensor & b = kernel.tensors[i];
        if (is_missing(a) || is_laid_as(a, b)) {
            layout[(size_t) i].kernel.type = NEURON_KERNELS_ABSENT;
            continue;
        }
        for (int axis = 0; axis < GGML_MAX_DIMS; axis++) {
            if (b.ne[axis] < a.ne[axis]) {
                return false;
            }
            longer = longer || b.ne[axis] > a.ne[axis];
        }
        const bool result = i == node.n_src || is_own_result(op, i);
        if (!result && !neuron_is_of_call(op->src[i])) {
            return false;
        }
        layout[(size_t) i] = { a, b, i == open.mask, !result };
    }
    return longer;
}

//
// the index
//

void neuron_laid_out_index::add(const neuron_signature & kernel, const neuron_bundle * bundle, int32_t number) {
    const open_axes open = find_open(kernel);
    if (open.is_possible) {
        kernels[laid_out_family(kernel, open)].push_back({ kernel, bundle, number });
    }
}

neuron_kernel neuron_laid_out_index::find(const ggml_tensor *      op,
                                          const neuron_signature & node,
                                          neuron_layout_of_node &  layout) const {
    neuron_kernel   best;
    size_t          least = 0;
    const open_axes open  = find_open(node);
    const bool      own   = node.alias == NEURON_KERNELS_NO_ALIAS || is_own_result(op, node.alias);
    const auto      found = open.is_possible && own ? kernels.find(laid_out_family(node, open)) : kernels.end();
    if (found == kernels.end()) {
        return best;
    }
    neuron_layout_of_node tried;
    for (const kernel & k : found->second) {
        if (memcmp(k.signature.op_params, node.op_params, nk::PARAM_WORDS * sizeof(uint64_t)) != 0 ||
            !fit_laid_out(op, node, k.signature, open, tried)) {
            continue;
        }
        size_t bytes = 0;
        for (int i = 0; i <= node.n_src; i++) {
            bytes += is_missing(k.signature.tensors[i]) ? 0 : neuron_nbytes(k.signature.tensors[i]);
        }
        if (!best || bytes < least) {
            least  = bytes;
            best   = { k.bundle, k.number, node.alias };
            layout = tried;
        }
    }
    return best;
}
