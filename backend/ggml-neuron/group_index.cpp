#include "group_index.h"

#include "../bundle/src/graph_key.h"
#include "../bundle/src/hash.h"
#include "../bundle/src/key.h"
#include "kernels.h"

#include <algorithm>
#include <cstring>

//
// tokens
//

static constexpr uint64_t BASE = 0x9E3779B97F4A7C15;

neuron_token_hashes::neuron_token_hashes(const std::vector<uint64_t> & tokens) {
    prefixes.reserve(tokens.size() + 1);
    powers.reserve(tokens.size() + 1);
    for (const uint64_t token : tokens) {
        prefixes.push_back(prefixes.back() * BASE + token);
        powers.push_back(powers.back() * BASE);
    }
}

static void add_words(nk::word_hash & h, const uint64_t * words, size_t n) {
    for (size_t i = 0; i < n; i++) {
        h.add(words[i]);
    }
}

static uint64_t token_of(const nk::graph_node & node) {
    nk::word_hash h;
    h.add(node.op);
    h.add(node.n_inputs << 1 | (node.result != 0));
    add_words(h, node.tensor, nk::TENSOR_WORDS);
    const uint64_t * inputs = node.inputs;
    for (uint64_t i = 0; i < node.n_inputs; i++) {
        if (const uint64_t * tensor = nk::next_graph_input(inputs)) {
            add_words(h, tensor, nk::TENSOR_WORDS);
        } else {
            h.add(nk::ABSENT_WORD);
        }
    }
    add_words(h, node.params, nk::PARAM_WORDS);
    return h.value();
}

bool neuron_tensor_words(const ggml_tensor * t, uint64_t * words) {
    const nk::type_traits * type = nk::find_type(t->type);
    if (!type) {
        return false;
    }
    words[0] = (uint64_t) t->type;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        words[1 + i] = (uint64_t) t->ne[i];
        words[5 + i] = t->nb[i];
    }
    return nk::canonicalize(*type, t->ne, words + 5);
}

uint64_t neuron_token_of(const ggml_tensor * node) {
    uint64_t      words[nk::TENSOR_WORDS];
    nk::word_hash h;
    const int     n_src = neuron_n_src(node);
    h.add(nk::hash_op(ggml_op_desc(node)));
    h.add((uint64_t) n_src << 1 | (node->view_src != nullptr));
    if (!neuron_tensor_words(node, words)) {
        return 0;
    }
    add_words(h, words, nk::TENSOR_WORDS);
    for (int i = 0; i < n_src; i++) {
        if (!node->src[i]) {
            h.add(nk::ABSENT_WORD);
            continue;
        }
        if (!neuron_tensor_words(node->src[i], words)) {
            return 0;
        }
        add_words(h, words, nk::TENSOR_WORDS);
    }
    static_assert(sizeof(node->op_params) == nk::PARAM_WORDS * sizeof(uint64_t), "parameters are words of a key");
    uint64_t params[nk::PARAM_WORDS];
    memcpy(params, node->op_params, sizeof(params));
    add_words(h, params, nk::PARAM_WORDS);
    return h.value();
}

//
// groups
//

uint64_t neuron_wiring_hash(const uint64_t * key, size_t n_words) {
    nk::word_hash    h;
    const uint64_t * from = key;
    const uint64_t * end  = key + n_words;
    for (const uint64_t * node = nk::first_graph_node(key); node < end; node = nk::read_graph_node(node).end) {
        add_words(h, from, (size_t) (node + 1 - from));
        h.add(node[1] & 0xFFFFFFFF);
        from = node + 2;
    }
    add_words(h, from, (size_t) (end - from));
    return h.value();
}

void neuron_group_index::add(const uint64_t * key, size_t n_words) {
    std::vector<uint64_t> tokens;
    for (const uint64_t * words = nk::first_graph_node(key); words < key + n_words;) {
        const nk::graph_node node = nk::read_graph_node(words);
        tokens.push_back(token_of(node));
        words = node.end;
    }
    members.insert(tokens.begin(), tokens.end());
    const neuron_token_hashes           hashes(tokens);
    std::vector<neuron_group_pattern> & same = patterns[tokens.front()];
    auto it = std::find_if(same.begin(), same.end(), [&](const neuron_group_pattern & p) {
        return p.tokens.size() == hashes.size() && p.tokens.part(0, hashes.size()) == hashes.part(0, hashes.size());
    });
    if (it == same.end()) {
        it = std::find_if(same.begin(), same.end(),
                          [&](const neuron_group_pattern & p) { return p.tokens.size() < hashes.size(); });
        it = same.insert(it, { hashes, {} });
    }
    it->wirings.insert(neuron_wiring_hash(key, n_words));
}

const std::vector<neuron_group_pattern> * neuron_group_index::beginning_with(uint64_t token) const {
    const auto found = patterns.find(token);
    return found == patterns.end() ? nullptr : &found->second;
}
