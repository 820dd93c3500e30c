#include "graph_key.h"

#include "key.h"

#include <algorithm>
#include <vector>

namespace nk {

namespace {

constexpr const char * LENGTH = "its length does not fit its nodes";

// Sets `n` to the bytes from a tensor's first element to its last, as ggml_nbytes computes them. Returns false when
// this library lacks the tensor's type, and when the tensor is larger than any memory.
bool tensor_bytes(const uint64_t * words, uint64_t & n) {
    const type_traits * type = find_type(static_cast<int64_t>(words[0]));
    if (!type) {
        return false;
    }
    // the first dimension of a quantized type is contiguous blocks
    n = type->block > 1 ? words[1] / type->block * type->size : type->size;
    for (int i = type->block > 1 ? 1 : 0; i < 4; i++) {
        uint64_t more;
        if (__builtin_mul_overflow(words[1 + i] - 1, words[5 + i], &more) || __builtin_add_overflow(n, more, &n)) {
            n = UINT64_MAX;
            return true;
        }
    }
    return true;
}

// Reads a key from beginning to end.
class graph_reader {
  public:
    graph_reader(const uint64_t * words, size_t n_words) : words(words), end(words + n_words) {}

    const char * read() {
        if (const char * problem = read_slots()) {
            return problem;
        }
        for (uint64_t i = 0; i < n_nodes; i++) {
            if (const char * problem = read_node()) {
                return problem;
            }
        }
        return words == end ? check_whole() : LENGTH;
    }

  private:
    struct slot {
        uint64_t extent;
        uint64_t begin;  // first byte of the uses that were read
        uint64_t end;
        bool     known;  // this library has the types of all uses
    };

    struct node {
        bool     own;    // the result has its own memory
        bool     known;  // this library has its type
        uint64_t n_bytes;
    };

    bool has(size_t n) const { return static_cast<size_t>(end - words) >= n; }

    const char * read_slots() {
        if (!has(2)) {
            return "it is too short";
        }
        n_nodes                = words[1] & 0xFFFFFFFF;
        const uint64_t n_slots = words[1] >> 32;
        if (n_nodes == 0 || n_nodes > MAX_GRAPH_NODES || n_slots > MAX_GRAPH_SLOTS) {
            return "it has no nodes, or more nodes or slots than 65536";
        }
        words += 2;
        // before any allocation
        if (!has(n_slots) || !has(n_slots + n_nodes * (GRAPH_NODE_WORDS + TENSOR_WORDS + PARAM_WORDS))) {
            return LENGTH;
        }
        for (uint64_t i = 0; i < n_slots; i++) {
            if (words[i] == 0 || words[i] > INT64_MAX) {
                return "a slot has an impossible extent";
            }
            slots.push_back({ words[i], UINT64_MAX, 0, true });
        }
        nodes.reserve(n_nodes);
        words += n_slots;
        return nullptr;
    }

    // Checks the slot or node that the tensor at `tensor` refers to.
    const char * refer(const graph_reference & reference, uint64_t offset, const uint64_t * tensor) {
        uint64_t   n_bytes = 0;
        uint64_t   last;
        const bool known = tensor_bytes(tensor, n_bytes);
        if (__builtin_add_overflow(offset, n_bytes, &last)) {
            last = UINT64_MAX;
        }
        if (!reference.is_slot) {
            const node & of = nodes[reference.index];
            if (!of.own) {
                return "it refers to a node that has no memory of its own";
            }
            return known && of.known && last > of.n_bytes ? "a tensor reaches beyond the node that it refers to"
                                                          : nullptr;
        }
        if (reference.index > n_seen || reference.index >= slots.size()) {
            return "its slots are not numbered in the order of their first use";
        }
        n_seen    = std::max(n_seen, reference.index + 1);
        slot & of = slots[reference.index];
        if (offset >= of.extent || last > of.extent) {
            return "a tensor reaches beyond the slot that it refers to";
        }
        of.begin = std::min(of.begin, offset);
        of.end   = std::max(of.end, last);
        of.known = of.known && known;
        return nullptr;
    }

    const char * read_input(bool & absent) {
        if (!has(1)) {
            return LENGTH;
        }
        absent = words[0] == ABSENT_WORD;
        if (absent) {
            words++;
            return nullptr;
        }
        if (!has(GRAPH_INPUT_WORDS + TENSOR_WORDS)) {
            return LENGTH;
        }
        const uint64_t * tensor = words + GRAPH_INPUT_WORDS;
        if (const char * problem = check_key_tensor(tensor)) {
            return problem;
        }
        const graph_reference reference = read_reference(words[0]);
        // the last node in `nodes` is this node itself: ggml_cast makes a node that is its own source
        if (!reference.is_slot && reference.index >= nodes.size()) {
            return "a node has an input that is computed after it";
        }
        if (const char * problem = refer(reference, words[1], tensor)) {
            return problem;
        }
        words += GRAPH_INPUT_WORDS + TENSOR_WORDS;
        return nullptr;
    }

    // Reads the place of a node's result. It is numbered after the inputs, though it stands before them.
    const char * read_result(const uint64_t * head, bool escapes) {
        if (head[0] == 0) {
            visible = visible || escapes;
            return head[1] != 0 ? "a result in memory of its own has an offset" : nullptr;
        }
        const graph_reference reference = read_reference(head[0] - 1);
        if (escapes) {
            return "a result without memory of its own escapes";
        }
        if (!reference.is_slot && reference.index + 1 >= nodes.size()) {
            return "a result is in the memory of a node that is computed after it";
        }
        visible = visible || reference.is_slot;
        return refer(reference, head[1], head + 2);
    }

    const char * read_node() {
        if (!has(GRAPH_NODE_WORDS + TENSOR_WORDS)) {
            return LENGTH;
        }
        const uint64_t   n_inputs = words[1] & 0xFFFFFFFF;
        const uint64_t   escapes  = words[1] >> 32;
        const uint64_t * head     = words + 2;
        if (n_inputs > NEURON_KERNELS_MAX_INPUTS || escapes > 1) {
            return "a node has more inputs than any, or an impossible flag";
        }
        if (const char * problem = check_key_tensor(head + 2)) {
            return problem;
        }
        nodes.push_back({ head[0] == 0, false, 0 });
        nodes.back().known = tensor_bytes(head + 2, nodes.back().n_bytes);
        words += GRAPH_NODE_WORDS + TENSOR_WORDS;
        bool absent = false;
        for (uint64_t i = 0; i < n_inputs; i++) {
            if (const char * problem = read_input(absent)) {
                return problem;
            }
        }
        if (absent) {
            return "the last input of a node is absent";
        }
        if (!has(PARAM_WORDS)) {
            return LENGTH;
        }
        words += PARAM_WORDS;
        return read_result(head, escapes != 0);
    }

    const char * check_whole() const {
        if (n_seen != slots.size()) {
            return "a slot is not used";
        }
        for (const slot & s : slots) {
            if (s.begin != 0 || (s.known && s.end != s.extent)) {
                return "a slot is not as large as its uses, so it could not be found";
            }
        }
        return visible ? nullptr : "nothing that it computes can be seen";
    }

    const uint64_t *  words;
    const uint64_t *  end;
    uint64_t          n_nodes = 0;
    uint64_t          n_seen  = 0;  // slots used so far
    bool              visible = false;
    std::vector<slot> slots;
    std::vector<node> nodes;
};

}  // namespace

const uint64_t * first_graph_node(const uint64_t * words) {
    return words + 2 + (words[1] >> 32);
}

const uint64_t * next_graph_input(const uint64_t *& inputs) {
    if (*inputs == ABSENT_WORD) {
        inputs++;
        return nullptr;
    }
    const uint64_t * tensor = inputs + GRAPH_INPUT_WORDS;
    inputs                  = tensor + TENSOR_WORDS;
    return tensor;
}

graph_node read_graph_node(const uint64_t * words) {
    graph_node node{
        words[0], words[1] & 0xFFFFFFFF, words[1] >> 32 != 0, words[2], words + GRAPH_NODE_WORDS, nullptr, nullptr,
        nullptr
    };
    node.inputs = node.params = node.tensor + TENSOR_WORDS;
    for (uint64_t i = 0; i < node.n_inputs; i++) {
        next_graph_input(node.params);
    }
    node.end = node.params + PARAM_WORDS;
    return node;
}

const char * check_graph_key(const uint64_t * words, size_t n_words) {
    return graph_reader(words, n_words).read();
}

}  // namespace nk
