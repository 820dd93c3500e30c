// Attention without flash attention, for any number of tokens and any length of the cache: nodes that are computed
// together, for some tokens after the other.
//
// The scores of all heads (MUL_MAT of K and the query, SOFT_MAX, MUL_MAT of V and these) lie such that the rows of a token are
// apart from each other, at distances with the number of tokens in them. So none of these nodes can be cut for itself. But
// no other node uses what is between them: it is in scratch memory, as kernels for other numbers of tokens and a longer cache
// have it, and only the last node's result (CONT, which puts a token's heads side by side) is written where ggml has it.
//
// Sequences with a cache each are streams in dimension 3: kernels for one compute one after the other.

#pragma once

#include "ggml.h"
#include "select/kernel_store.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// A node of attention.
struct neuron_attention_node {
    const ggml_tensor * node = nullptr;
    neuron_signature    signature;
    int                 sources[GGML_MAX_SRC];     // as neuron_group_piece::inputs
    int8_t              tokens[GGML_MAX_SRC + 1];  // the tokens' axis of each source and then the result, or -1
    int8_t              cells[GGML_MAX_SRC + 1];   // the cells' axis of the same, or -1
};

struct neuron_attention {
    std::vector<neuron_attention_node> nodes;  // in their order

    // What its nodes read besides each other's results, and what it computes, as if it were one node. Where SOFT_MAX is yet to come, with
    // a mask or without, rule.mask is behind all sources.
    neuron_signature  signature;
    neuron_token_rule rule;
    neuron_cut        cut;

    // Streams, of which all signatures have the first one; bytes from one to the next in each source and then in the result, 0 in what all have.
    int64_t n_streams                 = 1;
    size_t  strides[GGML_MAX_SRC + 1] = {};

    neuron_group group;  // its slots are there from the beginning, the rest by neuron_kernel_store::select

    // Returns a tensor of a node as a kernel for other numbers has it: source i, or the result.
    neuron_kernels_tensor piece(const neuron_attention_node & node, int i, int64_t n_tokens, int64_t n_cells) const;
};

// Returns the attention that ends with a node, or the beginning of it; NULL when it is in none. Where SOFT_MAX is yet to come,
// `scores` says whether it will.
std::shared_ptr<neuron_attention> neuron_attention_to(const ggml_tensor * last, bool scores);

// Returns whether a node is the last of attention.
inline bool neuron_ends_attention(const ggml_tensor * node) {
    return node->op == GGML_OP_CONT;
}
