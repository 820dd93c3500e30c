// Keys of graph kernels: the words that identify several nodes of a graph (docs/reference/bundle-keys.md, "Key of a
// graph").

#pragma once

#include <cstddef>
#include <cstdint>

namespace nk {

constexpr const char * GRAPH = "graph";  // the hash of this word is the key's first word

constexpr uint64_t MAX_GRAPH_NODES = 1 << 16;
constexpr uint64_t MAX_GRAPH_SLOTS = 1 << 16;

// Words of a node besides its tensors and parameters: its op, the number of its inputs with the escape flag, and its
// result's place (2).
constexpr size_t GRAPH_NODE_WORDS = 4;

// Words of a present input besides its tensor: the slot or node that it refers to, and the offset there.
constexpr size_t GRAPH_INPUT_WORDS = 2;

// Returns the mistake in a graph's key, or nullptr. The key's first word must be a graph's.
const char * check_graph_key(const uint64_t * words, size_t n_words);

// The slot or node that an input or a result refers to.
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
    uint64_t         result;  // 0, or 1 + the word of the slot or node that its result refers to
    const uint64_t * tensor;
    const uint64_t * inputs;
    const uint64_t * params;
    const uint64_t * end;
};

// Returns the first node of a graph's valid key. The next node begins at the end of this one.
const uint64_t * first_graph_node(const uint64_t * words);

graph_node read_graph_node(const uint64_t * words);

// Returns the words of an input's tensor, or NULL for an absent input, and steps to the next input.
const uint64_t * next_graph_input(const uint64_t *& inputs);

}  // namespace nk
