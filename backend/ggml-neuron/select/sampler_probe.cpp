#include "select/sampler_probe.h"

#include "select/tensors.h"

#include <cmath>
#include <cstring>

// The numbers of candidates in versions of llama.cpp.
static constexpr int64_t PROBED[] = { 1 << 17, 1 << 20 };

// The longest chain of nodes in a sampler's graph; nodes in longer chains are in no such graph.
static constexpr int MAX_DEPTH = 64;

static bool is_row_of(const ggml_tensor * t, int64_t n) {
    return (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_I32) && ggml_nelements(t) == n &&
           (t->ne[0] == n || t->ne[1] == n);
}

int64_t neuron_probed_candidates(const ggml_tensor * op) {
    // No tensor of it has memory, and all tensors with an element per candidate are computed from inputs.
    for (const int64_t n : PROBED) {
        bool has_row = is_row_of(op, n);
        for (const ggml_tensor * src : op->src) {
            if (src && neuron_buffer_of_root(src)) {
                return 0;
            }
            has_row = has_row || (src && is_row_of(src, n));
        }
        const ggml_tensor * t = op;
        for (int i = 0; !has_row && t && i < MAX_DEPTH && !neuron_buffer_of_root(t); i++) {
            t       = t->src[0] == t ? nullptr : t->src[0];
            has_row = t && is_row_of(t, n);
        }
        if (has_row) {
            return n;
        }
    }
    return 0;
}

bool neuron_has_candidates(const ggml_tensor * op) {
    return op->op == GGML_OP_PAD || op->op == GGML_OP_TOP_K;
}

static void resize(ggml_tensor & t, int64_t from, int64_t to) {
    t.view_src = nullptr;
    t.buffer   = nullptr;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        t.ne[i] = t.ne[i] == from ? to : t.ne[i];
        t.nb[i] = i == 0 ? ggml_type_size(t.type) : t.nb[i - 1] * (size_t) t.ne[i - 1];
    }
}

// Parameters also contain numbers of candidates: bounds of an index, and the entropy of equally likely candidates.
static void resize_parameters(ggml_tensor & t, int64_t from, int64_t to) {
    if (t.op != GGML_OP_CLAMP && t.op != GGML_OP_SCALE) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        float value;
        memcpy(&value, &t.op_params[i], sizeof(value));
        value = value == (float) from                ? (float) to
                : value == (float) (from - 1)        ? (float) (to - 1)
                : value == 1.0f / logf((float) from) ? 1.0f / logf((float) to)
                                                     : value;
        memcpy(&t.op_params[i], &value, sizeof(value));
    }
}

neuron_probe_node::neuron_probe_node(const ggml_tensor * op, int64_t probed, int64_t candidates) : node(*op) {
    resize(node, probed, candidates);
    resize_parameters(node, probed, candidates);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (!op->src[i]) {
            continue;
        }
        sources[i] = *op->src[i];
        resize(sources[i], probed, candidates);
        node.src[i] = op->src[i] == op ? &node : &sources[i];
        memset(sources[i].src, 0, sizeof(sources[i].src));
    }
}
