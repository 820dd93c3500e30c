// The nodes of a graph's key (docs/reference/bundle-keys.md, "Key of a graph"), for all code that compares groups with
// kernels.

#pragma once

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/key.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct neuron_key_input {
    const uint64_t *    tensor = nullptr;  // nk::TENSOR_WORDS; NULL: absent
    nk::graph_reference to{};
    uint64_t            offset = 0;        // in the slot or node that it refers to

    bool is_in_slot() const { return tensor && to.is_slot; }

    bool is_in_node() const { return tensor && !to.is_slot; }
};

struct neuron_key_node {
    uint64_t                      op;
    bool                          escapes;
    bool                          is_own;  // the result has its own memory
    nk::graph_reference           to;      // else the slot or node that receives it
    uint64_t                      offset;  // in that slot or node
    const uint64_t *              tensor;
    const uint64_t *              params;
    std::vector<neuron_key_input> inputs;

    bool is_in_slot() const { return !is_own && to.is_slot; }
};

// A valid key; the caller keeps its words alive.
struct neuron_key {
    neuron_key(const uint64_t * words, size_t n_words);

    size_t n_slots() const { return (size_t) (words[1] >> 32); }

    size_t slot_size(size_t i) const { return (size_t) words[2 + i]; }

    // Returns whether two keys are equal except for the extents of slots and tensors, and the offsets of inputs.
    bool is_wired_as(const neuron_key & other) const;

    const uint64_t *             words;
    size_t                       n_words;
    std::vector<neuron_key_node> nodes;
};

// Hashes of ops with special rules in keys: for attention without flash attention, for writes, and for copies.
struct neuron_key_ops {
    const uint64_t mul_mat  = nk::hash_op("mul_mat");
    const uint64_t soft_max = nk::hash_op("soft_max");
    const uint64_t add      = nk::hash_op("add");
    const uint64_t get_rows = nk::hash_op("get_rows");
    const uint64_t scale    = nk::hash_op("scale");
    const uint64_t tanh     = nk::hash_op("tanh");
    const uint64_t set_rows = nk::hash_op("set_rows");
    const uint64_t cont     = nk::hash_op("cont");
    const uint64_t cpy      = nk::hash_op("cpy");
    const uint64_t dup      = nk::hash_op("dup");
    const uint64_t pad      = nk::hash_op("pad");
    const uint64_t top_k    = nk::hash_op("top_k");
    const uint64_t concat   = nk::hash_op("concat");

    const uint64_t flash_attn_ext = nk::hash_op("flash_attn_ext");
    const uint64_t all_reduce     = nk::hash_op("all_reduce");

    static const neuron_key_ops & get();

    bool copies(uint64_t op) const { return op == cont || op == cpy || op == dup; }
};

constexpr size_t NEURON_SET_ROWS_INTO = 2;  // number of the source that SET_ROWS writes to, and the written axis
constexpr int    NEURON_SET_ROWS_AXIS = 1;

constexpr size_t NEURON_SOFT_MAX_MASK = 1;  // number of the source of SOFT_MAX that hides cells
