// Attention without flash attention, for any number of tokens and any length of the cache. Kernels compute its nodes
// together, for some tokens at a time.
//
// In the scores of all heads (MUL_MAT of K and the query, SOFT_MAX, MUL_MAT of V and these), the rows of a token are
// apart, at distances that contain the number of tokens. So no node can be cut alone. But no other node uses the
// intermediate results: they are in scratch memory, in the form of kernels for other numbers of tokens and a longer
// cache. Only the last node's result (CONT, which joins a token's heads) is written to ggml's place.
//
// Sequences with their own caches are streams in dimension 3: kernels for one stream compute them one after the other.

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
    int                 sources[GGML_MAX_SRC];     // like neuron_group_piece::inputs
    int8_t              tokens[GGML_MAX_SRC + 1];  // the tokens' axis of each source and then the result, or -1
    int8_t              cells[GGML_MAX_SRC + 1];   // the cells' axis of the same tensors, or -1
};

struct neuron_attention {
    std::vector<neuron_attention_node> nodes;  // in order

    // The tensors that the nodes read, except for each other's results, and the result, as if attention were one node.
    // While SOFT_MAX, with or without a mask, is still missing, rule.mask is behind all sources.
    neuron_signature  signature;
    neuron_token_rule rule;
    neuron_cut        cut;

    // The number of streams; all signatures describe the first one. `strides`: bytes from one stream to the next in
    // each source and then in the result; 0 if shared.
    int64_t n_streams                 = 1;
    size_t  strides[GGML_MAX_SRC + 1] = {};

    neuron_group group;  // has its slots from the beginning; neuron_kernel_store::select adds the rest

    // Returns a tensor of a node of a kernel for other numbers: source i, or the result.
    neuron_kernels_tensor piece(const neuron_attention_node & node, int i, int64_t n_tokens, int64_t n_cells) const;
};

// Returns the attention that ends with a node, or its part up to this node; NULL for a node outside attention. If
// SOFT_MAX is still missing, `scores` states whether it will follow.
std::shared_ptr<neuron_attention> neuron_attention_to(const ggml_tensor * last, bool scores);

// Returns whether a node is the last node of attention.
inline bool neuron_ends_attention(const ggml_tensor * node) {
    return node->op == GGML_OP_CONT;
}
