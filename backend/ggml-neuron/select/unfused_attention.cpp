#include "select/unfused_attention.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

// The most nodes of attention: the two products, a soft cap of the scores, SOFT_MAX, a product that decompresses
// values, CONT.
static constexpr size_t MAX_NODES = 12;

static constexpr int STREAM_AXIS = 3;

// Returns the first stream's part of a tensor.
static neuron_kernels_tensor first_stream(neuron_kernels_tensor t) {
    if (t.type != NEURON_KERNELS_ABSENT) {
        t.ne[STREAM_AXIS] = 1;
    }
    return t;
}

//
// finding
//

static bool is_elementwise(const ggml_tensor * t) {
    return t->op == GGML_OP_SCALE || (t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == GGML_UNARY_OP_TANH);
}

// Returns whether a tensor equals another one with the axes of tokens and of heads swapped.
static bool is_swapped(const ggml_tensor * t, const ggml_tensor * of) {
    return t->op == GGML_OP_PERMUTE && t->src[0] == of && t->view_offs == of->view_offs && t->ne[0] == of->ne[0] &&
           t->ne[1] == of->ne[2] && t->ne[2] == of->ne[1] && t->ne[3] == of->ne[3] && t->nb[0] == of->nb[0] &&
           t->nb[1] == of->nb[2] && t->nb[2] == of->nb[1];
}

// Returns the index of the source that another node of attention computes, or -1 when attention begins here.
static int previous_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT:
            return node->src[1]->op == GGML_OP_SOFT_MAX || node->src[1]->op == GGML_OP_MUL_MAT ? 1 : -1;
        default:
            return 0;
    }
}

// Returns the node that computes a source of a node.
static const ggml_tensor * computed(const ggml_tensor * node, int src) {
    const ggml_tensor * t = node->src[src];
    return neuron_ends_attention(node) ? t->src[0] : t;
}

// Sets `nodes` to the nodes from the first to this one. Returns whether they are attention.
static bool walk(const ggml_tensor * last, std::vector<const ggml_tensor *> & nodes) {
    for (const ggml_tensor * node = last; nodes.size() < MAX_NODES;) {
        const bool ends = neuron_ends_attention(node);
        if (node->view_src ||
            (ends && (node != last || !node->src[0]->src[0] || !is_swapped(node->src[0], node->src[0]->src[0])))) {
            return false;
        }
        if (!ends && node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_SOFT_MAX && !is_elementwise(node)) {
            return false;
        }
        nodes.insert(nodes.begin(), node);
        const int previous = previous_of(node);
        if (previous < 0) {
            return true;
        }
        node = computed(node, previous);
    }
    return false;
}

static bool is_dense_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t);
}

// Returns whether a node that joins heads gives each token a row.
static bool has_rows_of_heads(const ggml_tensor * node) {
    const ggml_tensor * heads = node->src[0];
    return node->ne[0] == heads->ne[0] * heads->ne[1] && node->ne[1] == heads->ne[2] * heads->ne[3];
}

// Returns whether all nodes have equal numbers of tokens, heads and streams, and SOFT_MAX turns the scores of a query
// into weights exactly once.
static bool fit_together(const std::vector<const ggml_tensor *> & nodes) {
    const ggml_tensor * first      = nodes.front();
    size_t              n_soft_max = 0;
    for (const ggml_tensor * node : nodes) {
        n_soft_max += node->op == GGML_OP_SOFT_MAX;
        const bool alike = neuron_ends_attention(node) ||
                           (node->ne[1] == first->ne[1] && node->ne[2] == first->ne[2] && node->ne[3] == first->ne[3]);
        if (!alike || !is_dense_f32(node)) {
            return false;
        }
    }
    return first->op == GGML_OP_MUL_MAT && first->ne[2] > 1 && n_soft_max <= 1;
}

namespace {

// Builds attention node by node.
class attention_builder {
  public:
    attention_builder(neuron_attention & attention, bool scores) : attention(attention), scores(scores) {}

    // Adds a node. Returns whether it fits.
    bool add(const ggml_tensor * node);

  private:
    bool has_streams(const ggml_tensor * t) const;
    int  add_source(ggml_tensor * t, int tokens, int cells);
    bool add_product(neuron_attention_node & n);
    bool add_soft_max(neuron_attention_node & n);

    neuron_attention & attention;
    bool               scores;           // whether the current nodes have a column per cell
    bool               weights = false;  // whether these columns are SOFT_MAX's weights
};

// Returns whether each stream has its own part of a tensor, or all streams share the tensor.
bool attention_builder::has_streams(const ggml_tensor * t) const {
    return t->ne[STREAM_AXIS] == 1 || t->ne[STREAM_AXIS] == attention.n_streams;
}

// Adds a source of attention. Returns its number.
int attention_builder::add_source(ggml_tensor * t, int tokens, int cells) {
    const int i = attention.signature.n_src;
    if (!t || i == NEURON_TOKEN_SOURCES) {
        return neuron_group_piece::ABSENT;
    }
    attention.rule.sources[i]      = (int8_t) tokens;
    attention.rule.more[i]         = (int8_t) cells;
    attention.signature.tensors[i] = first_stream(neuron_tensor_of(t));
    attention.cut.axis[i]          = (int8_t) tokens;
    attention.strides[i]           = t->ne[STREAM_AXIS] == 1 ? 0 : t->nb[STREAM_AXIS];
    attention.group.slots.push_back({ t, 0, neuron_nbytes(attention.signature.tensors[i]) });
    return attention.signature.n_src++;
}

// Adds a product of the cache's keys and the query, of values and weights, or of a matrix per head and any tensor.
bool attention_builder::add_product(neuron_attention_node & n) {
    ggml_tensor * matrix = n.node->src[0];
    ggml_tensor * b      = n.node->src[1];
    const bool    first  = attention.nodes.empty();
    const bool    values = !first && scores;
    if (!has_streams(matrix) || b->ne[STREAM_AXIS] != attention.n_streams || (values && !weights)) {
        return false;
    }
    n.cells[0]   = first && scores ? 1 : values ? 0 : -1;
    n.sources[0] = add_source(matrix, -1, n.cells[0]);
    n.sources[1] = first ? add_source(b, 1, -1) : neuron_group_piece::PREVIOUS;
    n.tokens[1]  = 1;
    n.cells[1]   = values ? 0 : -1;
    scores       = first && scores;
    n.cells[2]   = scores ? 0 : -1;
    return n.sources[0] >= 0 && n.sources[1] != neuron_group_piece::ABSENT;
}

bool attention_builder::add_soft_max(neuron_attention_node & n) {
    ggml_tensor * mask = n.node->src[1];
    if (!scores || weights) {
        return false;
    }
    weights      = true;
    n.sources[0] = neuron_group_piece::PREVIOUS;
    n.tokens[0]  = 1;
    n.cells[0] = n.cells[n.signature.n_src] = 0;
    if (mask) {
        if (mask->ne[0] != n.node->ne[0] || mask->ne[1] != n.node->ne[1] || mask->ne[2] != 1 || !has_streams(mask) ||
            mask->nb[0] != ggml_type_size(mask->type)) {
            return false;
        }
        n.tokens[1]         = 1;
        n.cells[1]          = 0;
        n.sources[1]        = add_source(mask, 1, 0);
        attention.rule.mask = (int8_t) n.sources[1];
    }
    if (n.node->src[2]) {
        n.sources[2] = add_source(n.node->src[2], -1, -1);
    }
    return std::all_of(n.sources, n.sources + n.signature.n_src,
                       [&](const int & s) { return s != neuron_group_piece::ABSENT || !n.node->src[&s - n.sources]; });
}

bool attention_builder::add(const ggml_tensor * node) {
    neuron_attention_node n;
    n.node      = node;
    n.signature = neuron_signature_of(node);
    for (int i = 0; i <= n.signature.n_src; i++) {
        n.signature.tensors[i] = first_stream(n.signature.tensors[i]);
    }
    std::fill(std::begin(n.sources), std::end(n.sources), neuron_group_piece::ABSENT);
    std::fill(std::begin(n.tokens), std::end(n.tokens), (int8_t) -1);
    std::fill(std::begin(n.cells), std::end(n.cells), (int8_t) -1);
    const int result = n.signature.n_src;
    n.tokens[result] = 1;
    bool fits        = true;
    if (node->op == GGML_OP_MUL_MAT) {
        fits = add_product(n);
    } else if (node->op == GGML_OP_SOFT_MAX) {
        fits = add_soft_max(n);
    } else {
        n.sources[0] = neuron_group_piece::PREVIOUS;
        n.tokens[0]  = neuron_ends_attention(node) ? 2 : 1;
        n.cells[0] = n.cells[result] = scores ? 0 : -1;
        fits                         = !scores || !neuron_ends_attention(node);
    }
    if (neuron_ends_attention(node)) {
        // a token's heads are one row, or adjacent rows
        const ggml_tensor * heads = node->src[0];
        const bool          rows  = has_rows_of_heads(node);
        fits                      = fits && (rows || ggml_are_same_shape(node, heads));
        n.tokens[result]          = rows ? 1 : 2;
        if (rows) {
            n.signature.tensors[result].ne[1] /= attention.n_streams;
        }
    }
    attention.nodes.push_back(n);
    return fits;
}

}  // namespace

// Returns whether the tokens of a tensor are contiguous.
static bool follow(const ggml_tensor * t) {
    size_t others = ggml_type_size(t->type) + (size_t) (t->ne[0] - 1) * t->nb[0] + (size_t) (t->ne[2] - 1) * t->nb[2];
    return t->ne[1] == 1 || t->nb[1] >= others;
}

std::shared_ptr<neuron_attention> neuron_attention_to(const ggml_tensor * last, bool scores) {
    std::vector<const ggml_tensor *> nodes;
    if (!walk(last, nodes) || !fit_together(nodes)) {
        return nullptr;
    }
    const auto is_soft_max = [](const ggml_tensor * node) {
        return node->op == GGML_OP_SOFT_MAX;
    };
    const bool weighs    = std::any_of(nodes.begin(), nodes.end(), is_soft_max);
    auto       attention = std::make_shared<neuron_attention>();
    attention->rule      = {
        "", 0, false, { -1, -1, -1, -1, -1 },
           { -1, -1, -1, -1, -1 },
           -1
    };
    attention->n_streams = nodes.front()->ne[STREAM_AXIS];
    attention_builder maker(*attention, weighs || scores);
    const bool        fits =
        std::all_of(nodes.begin(), nodes.end(), [&](const ggml_tensor * node) { return maker.add(node); });
    if (!fits || !follow(nodes.front()->src[1])) {
        return nullptr;
    }
    const neuron_attention_node & end    = attention->nodes.back();
    const int                     result = attention->signature.n_src;
    attention->signature.tensors[result] = end.signature.tensors[end.signature.n_src];
    attention->strides[result]           = ggml_nbytes(last) / (size_t) attention->n_streams;  // it has no gaps
    attention->rule.result               = end.tokens[end.signature.n_src];
    attention->cut.axis[result]          = attention->rule.result;
    attention->cut.rule                  = &attention->rule;
    attention->cut.n                     = nodes.front()->ne[1];
    attention->cut.n_more                = nodes.front()->ne[0];
    if (scores && !weighs) {
        attention->rule.mask = NEURON_TOKEN_SOURCES;
    }
    return attention;
}

//
// pieces
//

neuron_kernels_tensor neuron_attention::piece(const neuron_attention_node & node,
                                              int                           i,
                                              int64_t                       n_tokens,
                                              int64_t                       n_cells) const {
    neuron_kernels_tensor t = node.signature.tensors[i];
    if (node.tokens[i] >= 0) {
        t.ne[node.tokens[i]] = n_tokens;
    }
    if (node.cells[i] >= 0) {
        t.ne[node.cells[i]] = n_cells;
    }
    const bool result   = i == node.signature.n_src;
    const bool previous = !result && node.sources[i] == neuron_group_piece::PREVIOUS;
    if (result || (previous && !neuron_ends_attention(node.node)) ||
        (!previous && node.sources[i] == rule.mask && n_cells != cut.n_more)) {
        neuron_kernels_set_dense(&t);
    } else if (previous) {
        std::swap(t.ne[1], t.ne[2]);
        neuron_kernels_set_dense(&t);
        std::swap(t.ne[1], t.ne[2]);
        std::swap(t.nb[1], t.nb[2]);
    }
    return t;
}
