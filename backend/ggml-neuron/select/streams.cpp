#include "select/streams.h"

#include "select/group_key.h"
#include "select/key_nodes.h"
#include "select/tensors.h"
#include "select/tokens.h"
#include "select/unfused_attention.h"

#include <algorithm>

// numbers of FLASH_ATTN_EXT's sources
static constexpr int ATTN_Q = 0, ATTN_K = 1, ATTN_V = 2, ATTN_MASK = 3;
// numbers of SET_ROWS's sources
static constexpr int SET_ROWS_VALUES = 0, SET_ROWS_NUMBERS = 1;
static constexpr int SEQUENCE_AXIS     = 3;  // the sequences' axis of all these sources
static constexpr int RESULT_TOKEN_AXIS = 2;  // the axis of tokens in the result of attention
static constexpr int ROW_AXIS          = 1;  // the same without flash attention

// Returns whether a tensor is a whole input of its graph.
static bool is_given(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && !t->view_src;
}

// Returns whether a tensor is in the cache of one of several sequences, or in the caches of several sequences.
static bool is_of_several(const ggml_tensor * t) {
    const ggml_tensor * root   = neuron_root_of(const_cast<ggml_tensor *>(t));
    const size_t        stride = t->nb[SEQUENCE_AXIS];
    return is_given(root) && stride && ggml_nbytes(root) > stride && ggml_nbytes(root) % stride == 0;
}

static bool is_flash_attention(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || node->view_src || !node->src[ATTN_MASK]) {
        return false;
    }
    const int64_t       n    = node->ne[SEQUENCE_AXIS];
    const ggml_tensor * mask = node->src[ATTN_MASK];
    const auto          is   = [n](const ggml_tensor * t) {
        return t->ne[SEQUENCE_AXIS] == n;
    };
    return is_of_several(node->src[ATTN_K]) && is_of_several(node->src[ATTN_V]) && is(node->src[ATTN_Q]) &&
           is(node->src[ATTN_K]) && is(node->src[ATTN_V]) && is(mask) && mask->ne[2] == 1 && is_given(mask) &&
           ggml_is_contiguous(mask) && ggml_is_contiguous(node);
}

bool neuron_has_streams(const ggml_tensor * node) {
    return is_flash_attention(node) ||
           (neuron_ends_attention(node) && !node->view_src && node->src[0]->op == GGML_OP_PERMUTE);
}

neuron_streams::neuron_streams(const ggml_cgraph * cgraph, const std::unordered_set<int> & left) :
    whole(cgraph), split(*cgraph) {
    find_caches(left);
    nodes.reserve((size_t) cgraph->n_nodes);
    for (current = 0; current < cgraph->n_nodes && !found.empty(); current++) {
        ggml_tensor * node = cgraph->nodes[current];
        const bool done = !left.count(current) &&
                          (node->op == GGML_OP_SET_ROWS ? add_writes(node) : add_attention(node) || add_member(node));
        if (!done) {
            add(node);
        }
    }
    split.nodes   = nodes.data();
    split.n_nodes = (int) nodes.size();
}

// Notes that attention reads a tensor of the sequences' caches.
void neuron_streams::note_cache(ggml_tensor * t) {
    const size_t  stride = t->nb[SEQUENCE_AXIS];
    const caches  here   = { stride, (int64_t) (neuron_offset_of(t) / stride), t->ne[SEQUENCE_AXIS] };
    ggml_tensor * root   = neuron_root_of(t);
    const auto    known  = found.emplace(root, here);
    if (!is_given(root) || !(known.first->second == here)) {
        known.first->second.n = 0;
    }
}

// Notes the nodes of attention without flash attention that a node ends. Requires that it is attention of sequences
// with their own caches, and that no other node reads the intermediate results.
void neuron_streams::find_attention(int last) {
    ggml_tensor * end       = whole->nodes[last];
    const auto    attention = neuron_attention_to(end, false);
    const auto    n         = attention ? (int) attention->nodes.size() : 0;
    if (!n || attention->rule.result != ROW_AXIS || attention->rule.mask < 0 || n > last + 1) {
        return;
    }
    std::vector<std::pair<int, int>> members;  // with the number of the source that holds caches
    for (int node = last, k = n; k > 0; node--) {
        const ggml_tensor * t = attention->nodes[(size_t) (k - 1)].node;
        if (node < 0 || (whole->nodes[node] != t && neuron_is_work(whole->nodes[node]))) {
            return;
        }
        if (whole->nodes[node] != t) {
            continue;
        }
        if (k < n && ((t->flags & GGML_TENSOR_FLAG_OUTPUT) || neuron_uses_in_graph(whole, t) != 1)) {
            return;
        }
        const bool reads = t->op == GGML_OP_MUL_MAT && (k == 1 || t->src[1]->op == GGML_OP_SOFT_MAX);
        if (reads && (t->src[0]->ne[SEQUENCE_AXIS] != attention->n_streams || !is_of_several(t->src[0]))) {
            return;
        }
        members.emplace_back(node, reads ? 0 : -1);
        k--;
    }
    const ggml_tensor * mask = attention->group.slots[(size_t) attention->rule.mask].tensor;
    if (neuron_uses_in_graph(whole, end->src[0]) != 1 || mask->ne[SEQUENCE_AXIS] != attention->n_streams ||
        !is_given(mask) || !ggml_is_contiguous(mask)) {
        return;
    }
    for (const auto & [node, source] : members) {
        attentions[node] = { members.back().first, last, source };
        if (source >= 0) {
            note_cache(whole->nodes[node]->src[source]);
        }
    }
}

void neuron_streams::find_caches(const std::unordered_set<int> & left) {
    for (int i = 0; i < whole->n_nodes; i++) {
        ggml_tensor * node = whole->nodes[i];
        if (left.count(i)) {
            continue;
        }
        if (is_flash_attention(node)) {
            note_cache(node->src[ATTN_K]);
            note_cache(node->src[ATTN_V]);
        } else if (neuron_has_streams(node)) {
            find_attention(i);
        }
    }
    for (auto it = found.begin(); it != found.end();) {
        it = it->second.n ? std::next(it) : found.erase(it);
    }
    // attention is split as a whole or not at all
    std::unordered_set<int> without;
    for (const auto & [node, m] : attentions) {
        if (m.source >= 0 && !found.count(neuron_root_of(whole->nodes[node]->src[m.source]))) {
            without.insert(m.last);
        }
    }
    for (auto it = attentions.begin(); it != attentions.end();) {
        it = without.count(it->second.last) ? attentions.erase(it) : std::next(it);
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

// Returns part i of a tensor, with `n` elements along an axis.
ggml_tensor * neuron_streams::view_of(const ggml_tensor * t, int axis, int64_t n, int64_t i) {
    ggml_tensor * view = make(*t);
    view->view_src     = neuron_root_of(const_cast<ggml_tensor *>(t));
    view->view_offs    = neuron_offset_of(t) + (size_t) (i * n) * t->nb[axis];
    view->ne[axis]     = n;
    return view;
}

// Returns a part of an input of the graph as a tensor in the shape of another one.
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

// Returns the cache of a call's sequence i, with rows like another tensor's.
ggml_tensor * neuron_streams::cache_of(ggml_tensor * root, int64_t i, const ggml_tensor & row) {
    const caches & c  = found.at(root);
    ggml_tensor    of = row;
    of.ne[1]          = (int64_t) (c.stride / row.nb[1]);
    of.ne[2] = of.ne[3] = 1;
    return give(root, (size_t) (c.first + i) * c.stride, of);
}

// Adds a write for each sequence. Returns false for a node that does not write to several caches.
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

// Joins results of the sequences along an axis, as a node's result.
void neuron_streams::join(ggml_tensor * node, const std::vector<ggml_tensor *> & results_of_each, int axis) {
    ggml_tensor * joined = results_of_each.front();
    for (size_t i = 1; i < results_of_each.size(); i++) {
        ggml_tensor * concat = make(*results_of_each.front());
        concat->op           = GGML_OP_CONCAT;
        concat->ne[axis] *= (int64_t) i + 1;
        std::fill(std::begin(concat->op_params), std::end(concat->op_params), 0);
        std::fill(std::begin(concat->src), std::end(concat->src), nullptr);
        concat->op_params[0] = axis;
        concat->src[0]       = joined;
        concat->src[1]       = results_of_each[i];
        for (int next = axis + 1; next < GGML_MAX_DIMS; next++) {
            concat->nb[next] = concat->nb[next - 1] * (size_t) concat->ne[next - 1];
        }
        add(concat);
        joined = concat;
    }
    results[joined] = node;
}

// Adds attention for each sequence, and a join of the results. Returns false for attention of one sequence.
bool neuron_streams::add_attention(ggml_tensor * node) {
    if (!is_flash_attention(node) || !found.count(neuron_root_of(node->src[ATTN_K])) ||
        !found.count(neuron_root_of(node->src[ATTN_V]))) {
        return false;
    }
    const int64_t n        = node->ne[SEQUENCE_AXIS];
    ggml_tensor * mask     = node->src[ATTN_MASK];
    ggml_tensor   part     = *mask;
    part.ne[SEQUENCE_AXIS] = 1;

    std::vector<ggml_tensor *> attended;
    for (int64_t i = 0; i < n; i++) {
        ggml_tensor * own      = make(*node);
        own->ne[SEQUENCE_AXIS] = 1;
        own->src[ATTN_Q]       = view_of(node->src[ATTN_Q], SEQUENCE_AXIS, 1, i);
        for (const int source : { ATTN_K, ATTN_V }) {
            own->src[source] = source_of(node->src[source], i, n, true);
        }
        own->src[ATTN_MASK] = give(mask, (size_t) i * mask->nb[SEQUENCE_AXIS], part);
        add(own);
        attended.push_back(own);
    }
    join(node, attended, RESULT_TOKEN_AXIS);
    parts_of[current] = (int) (2 * n - 1);
    return true;
}

// Returns sequence i's part of a source of attention.
ggml_tensor * neuron_streams::source_of(ggml_tensor * t, int64_t i, int64_t n, bool is_cache) {
    ggml_tensor * root = neuron_root_of(t);
    if (is_cache) {
        ggml_tensor * cells = view_of(t, SEQUENCE_AXIS, 1, 0);
        cells->view_offs    = neuron_offset_of(t) % found.at(root).stride;
        cells->view_src     = cache_of(root, i, *t);
        return cells;
    }
    const auto split_node = split_nodes.find(root);
    if (split_node != split_nodes.end()) {
        ggml_tensor * part = split_node->second[(size_t) i];
        if (t == root) {
            return part;
        }
        ggml_tensor * view = view_of(t, SEQUENCE_AXIS, 1, 0);
        view->view_src     = part;
        return view;
    }
    return t->ne[SEQUENCE_AXIS] == n ? view_of(t, SEQUENCE_AXIS, 1, i) : t;
}

// Adds a node of attention without flash attention for each sequence, and behind the last node a join of the results.
// Returns false for a node outside attention of several sequences.
bool neuron_streams::add_member(ggml_tensor * node) {
    const auto where = attentions.find(current);
    if (where == attentions.end()) {
        return false;
    }
    const member &             m     = where->second;
    const int64_t              n     = whole->nodes[m.first]->ne[SEQUENCE_AXIS];
    const bool                 ends  = current == m.last;
    const bool                 masks = node->op == GGML_OP_SOFT_MAX;
    std::vector<ggml_tensor *> parts;
    for (int64_t i = 0; i < n; i++) {
        ggml_tensor * own = make(*node);
        own->ne[ends ? ROW_AXIS : SEQUENCE_AXIS] /= n;
        for (int source = 0; source < neuron_n_src(node); source++) {
            ggml_tensor * t = node->src[source];
            if (t && masks && source == (int) NEURON_SOFT_MAX_MASK) {
                ggml_tensor part       = *t;
                part.ne[SEQUENCE_AXIS] = 1;
                own->src[source]       = give(t, (size_t) i * t->nb[SEQUENCE_AXIS], part);
            } else if (t) {
                own->src[source] = source_of(t, i, n, source == m.source);
            }
        }
        add(own);
        parts.push_back(own);
    }
    parts_of[m.last] += (int) n;
    if (ends) {
        join(node, parts, ROW_AXIS);
        parts_of[m.last] += (int) n - 1;
    } else {
        split_nodes[node] = std::move(parts);
    }
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
