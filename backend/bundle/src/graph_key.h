// Keys of graph kernels: the words that several nodes of a graph are found by (docs/reference/bundle-keys.md, "Key of a graph").

#pragma once

#include <cstddef>
#include <cstdint>

namespace nk {

constexpr const char * GRAPH        = "graph";  // whose hash is the first word
constexpr uint32_t     GRAPH_FORMAT = 2;        // of the first bundles with such keys

constexpr uint64_t MAX_GRAPH_NODES = 1 << 16;
constexpr uint64_t MAX_GRAPH_SLOTS = 1 << 16;

// Of a node, beside its tensors: its op, the number of its inputs with whether it escapes, and where its result is.
constexpr size_t GRAPH_NODE_WORDS = 4;

// Of an input that is there, beside its tensor: what it refers to, and where in that.
constexpr size_t GRAPH_INPUT_WORDS = 2;

// Returns what is wrong with a graph's key, whose first word is that of a graph, or nullptr.
const char * check_graph_key(const uint64_t * words, size_t n_words);

// What an input or a result refers to.
struct graph_reference {
    bool     is_slot;
    uint64_t index;

    bool operator==(const graph_reference & other) const { return is_slot == other.is_slot && index == other.index; }
};

inline graph_reference read_reference(uint64_t word) {
    return { (word & 1) != 0, word >> 1 };
}

inline uint64_t reference_word(const graph_reference & reference) {
    return 2 * reference.index + reference.is_slot;
}

// A node in a graph's key.
struct graph_node {
    uint64_t         op;
    uint64_t         n_inputs;
    bool             escapes;
    uint64_t         result;  // 0, or 1 more than the word of what its result refers to
    const uint64_t * tensor;
    const uint64_t * inputs;
    const uint64_t * params;
    const uint64_t * end;
};

// Returns the first node of a graph's key that has no mistakes. The next one begins where a node ends.
const uint64_t * first_graph_node(const uint64_t * words);

graph_node read_graph_node(const uint64_t * words);

// Returns the words of an input's tensor, or NULL when it is absent, and steps to the next input.
const uint64_t * next_graph_input(const uint64_t *& inputs);

}  // namespace nk
