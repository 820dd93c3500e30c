#include "select/key_nodes.h"

#include <algorithm>
#include <utility>

neuron_key::neuron_key(const uint64_t * words, size_t n_words) : words(words), n_words(n_words) {
    nodes.reserve((size_t) (words[1] & 0xFFFFFFFF));
    for (const uint64_t * at = nk::first_graph_node(words); at < words + n_words;) {
        const nk::graph_node node = nk::read_graph_node(at);
        const auto           to   = node.result ? nk::read_reference(node.result - 1) : nk::graph_reference{};
        nodes.push_back({ node.op, node.escapes, node.result == 0, to, at[3], node.tensor, node.params, {} });
        nodes.back().inputs.resize((size_t) node.n_inputs);
        const uint64_t * from = node.inputs;
        for (neuron_key_input & in : nodes.back().inputs) {
            const uint64_t * reference = from;
            in.tensor                  = nk::next_graph_input(from);
            if (in.tensor) {
                in.to     = nk::read_reference(reference[0]);
                in.offset = reference[1];
            }
        }
        at = node.end;
    }
}

bool neuron_key::is_wired_as(const neuron_key & other) const {
    const auto same_input = [](const neuron_key_input & a, const neuron_key_input & b) {
        return (a.tensor != nullptr) == (b.tensor != nullptr) && a.to == b.to;
    };
    return n_words == other.n_words && std::equal(words, words + 2, other.words) &&
           std::equal(nodes.begin(), nodes.end(), other.nodes.begin(), [&](const auto & a, const auto & b) {
               return a.op == b.op && a.escapes == b.escapes && a.is_own == b.is_own && a.to == b.to &&
                      a.offset == b.offset && std::equal(a.params, a.params + nk::PARAM_WORDS, b.params) &&
                      std::equal(a.inputs.begin(), a.inputs.end(), b.inputs.begin(), b.inputs.end(), same_input);
           });
}

const neuron_key_ops & neuron_key_ops::get() {
    static const neuron_key_ops all;
    return all;
}
