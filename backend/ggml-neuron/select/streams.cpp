#include "select/streams.h"

#include "select/key_nodes.h"
#include "select/tensors.h"
#include "select/tokens.h"

#include <algorithm>

// the sources of FLASH_ATTN_EXT
static constexpr int ATTN_Q = 0, ATTN_K = 1, ATTN_V = 2, ATTN_MASK = 3;
// those of SET_ROWS
static constexpr int SET_ROWS_VALUES = 0, SET_ROWS_NUMBERS = 1;
static constexpr int SEQUENCE_AXIS     = 3;  // the axis of all of these
static constexpr int RESULT_TOKEN_AXIS = 2;  // the axis of tokens in the result of attention

// Returns whether a tensor is given to its graph, all of it.
static bool is_given(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && !t->view_src;
}

bool neuron_has_streams(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || node->view_src || !node->src[ATTN_MASK]) {
        return false;
    }
    const int64_t       n    = node->ne[SEQUENCE_AXIS];
    const ggml_tensor * mask = node->src[ATTN_MASK];
    const auto          is   = [n](const ggml_tensor * t) {
        return t->ne[SEQUENCE_AXIS] == n;
    };
    return n > 1 && is(node->src[ATTN_Q]) && is(node->src[ATTN_K]) && is(node->src[ATTN_V]) && is(mask) &&
           mask->ne[2] == 1 && is_given(mask) && ggml_is_contiguous(mask) && ggml_is_contiguous(node);
}

neuron_streams::neuron_streams(const ggml_cgraph * cgraph, const std::unordered_set<int> & left) :
    whole(cgraph), split(*cgraph) {
    find_caches(left);
    nodes.reserve((size_t) cgraph->n_nodes);
    for (current = 0; current < cgraph->n_nodes && !found.empty(); current++) {
        ggml_tensor * node = cgraph->nodes[current];
        const bool    done =
            !left.count(current) && (node->op == GGML_OP_SET_ROWS ? add_writes(node) : add_attention(node));
        if (!done) {
            add(node);
        }
    }
    split.nodes   = nodes.data();
    split.n_nodes = (int) nodes.size();
}

void neuron_streams::find_caches(const std::unordered_set<int> & left) {
    for (int i = 0; i < whole->n_nodes; i++) {
        const ggml_tensor * node = whole->nodes[i];
        for (const int source : { ATTN_K, ATTN_V }) {
            const ggml_tensor * t = neuron_has_streams(node) && !left.count(i) ? node->src[source] : nullptr;
            if (!t) {
                continue;
            }
            const size_t  stride = t->nb[SEQUENCE_AXIS];
            const caches  here   = { stride, (int64_t) (neuron_offset_of(t) / stride), t->ne[SEQUENCE_AXIS] };
            ggml_tensor * root   = neuron_root_of(node->src[source]);
            const auto    known  = found.emplace(root, here);
            if (!is_given(root) || !(known.first->second == here)) {
                known.first->second.n = 0;
            }
        }
    }
    for (auto it = found.begin(); it != found.end();) {
        it = it->second.n ? std::next(it) : found.erase(it);
    }
}

void neuron_streams::add(ggml_tensor * node) {
    nodes.push_back(node);
    originals.push_back(current);
}

ggml_tensor * neuron_streams::make(const ggml_tensor & like) {
    tensors.push_back(like);
    ggml_tensor & t = tensors.back();
    t.data          = nullptr;
    t.buffer        = nullptr;
    return &t;
}

// Returns the i-th of parts of a tensor with `n` elements of an axis each.
ggml_tensor * neuron_streams::view_of(const ggml_tensor * t, int axis, int64_t n, int64_t i) {
    ggml_tensor * view = make(*t);
    view->view_src     = neuron_root_of(const_cast<ggml_tensor *>(t));
    view->view_offs    = neuron_offset_of(t) + (size_t) (i * n) * t->nb[axis];
    view->ne[axis]     = n;
    return view;
}

// Returns a tensor like another one that is a part of what is given to the graph.
ggml_tensor * neuron_streams::give(ggml_tensor * whole, size_t offset, const ggml_tensor & like) {
    ggml_tensor *& t = made[{ whole, offset }];
    if (!t) {
        t            = make(like);
        t->op        = GGML_OP_NONE;
        t->view_src  = nullptr;
        t->view_offs = 0;
        std::fill(std::begin(t->src), std::end(t->src), nullptr);
        given[t] = { whole, offset };
    }
    return t;
}

// Returns the cache of a call's i-th sequence, of rows like another tensor's.
ggml_tensor * neuron_streams::cache_of(ggml_tensor * root, int64_t i, const ggml_tensor & row) {
    const caches & c  = found.at(root);
    ggml_tensor    of = row;
    of.ne[1]          = (int64_t) (c.stride / row.nb[1]);
    of.ne[2] = of.ne[3] = 1;
    return give(root, (size_t) (c.first + i) * c.stride, of);
}

// Adds a write for each sequence. Returns false where it is not one to the caches of several.
bool neuron_streams::add_writes(const ggml_tensor * node) {
    ggml_tensor *       root    = neuron_root_of(const_cast<ggml_tensor *>(node));
    const auto          caches  = found.find(root);
    const ggml_tensor * rows    = node->src[SET_ROWS_VALUES];
    ggml_tensor *       numbers = node->src[SET_ROWS_NUMBERS];
    if (caches == found.end() || node->ne[2] != 1 || node->ne[3] != 1 || neuron_offset_of(node) != 0 ||
        caches->second.stride % node->nb[1] != 0 || rows->ne[1] % caches->second.n != 0 || !is_given(numbers) ||
        !neuron_can_read_rows(numbers)) {
        return false;
    }
    const int64_t n       = rows->ne[1] / caches->second.n;
    const auto    n_cells = (int64_t) (caches->second.stride / node->nb[1]);
    parts_of[current]     = (int) caches->second.n;
    for (int64_t i = 0; i < caches->second.n; i++) {
        ggml_tensor of_each          = *numbers;
        of_each.ne[0]                = n;
        ggml_tensor * own            = give(numbers, (size_t) (i * n) * numbers->nb[0], of_each);
        given[own].first             = (caches->second.first + i) * n_cells;
        given[own].begin             = i * n;
        given[own].n                 = n;
        ggml_tensor * cache          = cache_of(root, i, *node);
        ggml_tensor * write          = make(*node);
        write->ne[1]                 = n_cells;
        write->view_src              = cache;
        write->view_offs             = 0;
        write->src[SET_ROWS_VALUES]  = view_of(rows, 1, n, i);
        write->src[SET_ROWS_NUMBERS] = own;

        write->src[NEURON_SET_ROWS_INTO] = cache;
        add(write);
    }
    return true;
}

// Adds attention of each sequence, and what puts the results after one another. Returns false where it is of one.
bool neuron_streams::add_attention(ggml_tensor * node) {
    if (!neuron_has_streams(node) || !found.count(neuron_root_of(node->src[ATTN_K])) ||
        !found.count(neuron_root_of(node->src[ATTN_V]))) {
        return false;
    }
    const int64_t n        = node->ne[SEQUENCE_AXIS];
    ggml_tensor * joined   = nullptr;
    ggml_tensor * mask     = node->src[ATTN_MASK];
    ggml_tensor   part     = *mask;
    part.ne[SEQUENCE_AXIS] = 1;

    std::vector<ggml_tensor *> attended;
    for (int64_t i = 0; i < n; i++) {
        ggml_tensor * own      = make(*node);
        own->ne[SEQUENCE_AXIS] = 1;
        own->src[ATTN_Q]       = view_of(node->src[ATTN_Q], SEQUENCE_AXIS, 1, i);
        for (const int source : { ATTN_K, ATTN_V }) {
            const ggml_tensor * t     = node->src[source];
            ggml_tensor *       root  = neuron_root_of(node->src[source]);
            ggml_tensor *       cells = view_of(t, SEQUENCE_AXIS, 1, 0);
            cells->view_offs          = neuron_offset_of(t) % found.at(root).stride;
            cells->view_src           = cache_of(root, i, *t);
            own->src[source]          = cells;
        }
        own->src[ATTN_MASK] = give(mask, (size_t) i * mask->nb[SEQUENCE_AXIS], part);
        add(own);
        attended.push_back(own);
    }
    for (int64_t i = 1; i < n; i++) {
        ggml_tensor * concat = make(*attended.front());
        concat->op           = GGML_OP_CONCAT;
        concat->ne[RESULT_TOKEN_AXIS] *= i + 1;
        std::fill(std::begin(concat->op_params), std::end(concat->op_params), 0);
        std::fill(std::begin(concat->src), std::end(concat->src), nullptr);
        concat->op_params[0] = RESULT_TOKEN_AXIS;
        concat->src[0]       = joined ? joined : attended.front();
        concat->src[1]       = attended[(size_t) i];
        concat->nb[3]        = concat->nb[RESULT_TOKEN_AXIS] * (size_t) concat->ne[RESULT_TOKEN_AXIS];
        add(concat);
        joined = concat;
    }
    results[joined]   = node;
    parts_of[current] = (int) (2 * n - 1);
    return true;
}

void neuron_streams::restore(neuron_group & group) const {
    for (int & node : group.nodes) {
        node = original(node);
    }
    group.nodes.erase(std::unique(group.nodes.begin(), group.nodes.end()), group.nodes.end());
    for (neuron_group_slot & slot : group.slots) {
        if (slot.mask && part_of(slot.mask)) {
            slot.mask = nullptr;  // the slot's own tensor
        }
        if (const neuron_stream_part * part = part_of(slot.tensor)) {
            slot.tensor = part->whole;
            slot.offset += part->offset;
            slot.first = part->first;
        }
    }
    for (neuron_group_result & result : group.results) {
        result.tensor = result_of(result.tensor);
    }
}
