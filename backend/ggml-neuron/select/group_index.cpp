#include "select/group_index.h"

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "select/kernel_store.h"
#include "select/numbers.h"
#include "select/tensors.h"
#include "select/tokens.h"
#include "weights/layouts.h"

#include <algorithm>
#include <array>
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

// Returns how many words of a tensor are in a token: only its type, or all.
static size_t n_tensor_words(neuron_token_kind kind) {
    return kind == neuron_token_kind::WITHOUT_EXTENTS ? 1 : nk::TENSOR_WORDS;
}

// Returns how many words of a SET_ROWS's destination are in a token: kernels may have only its first rows.
static size_t n_written_words(neuron_token_kind kind) {
    return std::min<size_t>(n_tensor_words(kind), 1 + NEURON_SET_ROWS_AXIS);
}

// Returns a node's parameters without the bit of kernels that leave out cells.
static neuron_params params_of(const neuron_key_node & node) {
    neuron_params params;
    std::copy(node.params, node.params + nk::PARAM_WORDS, params.begin());
    if (neuron_causal_kernel(node).n_tokens) {
        params[NEURON_CAUSAL_WORD] &= ~NEURON_CAUSAL_BIT;
    }
    return params;
}

static uint64_t token_of(const neuron_key_node & node, neuron_token_kind kind) {
    nk::word_hash h;
    const bool    writes = node.op == neuron_key_ops::get().set_rows;
    const size_t  n      = n_tensor_words(kind);
    h.add(node.op);
    h.add((uint64_t) node.inputs.size() << 1 | !node.is_own);
    add_words(h, node.tensor, writes ? n_written_words(kind) : n);
    for (size_t i = 0; i < node.inputs.size(); i++) {
        const uint64_t * tensor = node.inputs[i].tensor;
        const size_t     n_own  = writes && i == NEURON_SET_ROWS_INTO ? n_written_words(kind) : n;
        add_words(h, tensor ? tensor : &nk::ABSENT_WORD, tensor ? n_own : 1);
    }
    neuron_params params = params_of(node);
    if (kind != neuron_token_kind::WITH_NUMBERS) {
        neuron_open(node, params);
    }
    add_words(h, params.data(), nk::PARAM_WORDS);
    return h.value();
}

bool neuron_tensor_words(const ggml_tensor * t, uint64_t * words) {
    const int32_t           number = neuron_type_of(t);
    const nk::type_traits * type   = nk::find_type(number);
    if (!type) {
        return false;
    }
    words[0] = (uint64_t) number;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        words[1 + i] = (uint64_t) t->ne[i];
        words[5 + i] = t->nb[i];
    }
    return nk::canonicalize(*type, t->ne, words + 5);
}

uint64_t neuron_token_of(const ggml_tensor * node, neuron_token_kind kind) {
    uint64_t      words[nk::TENSOR_WORDS];
    const size_t  n      = n_tensor_words(kind);
    const bool    writes = node->op == GGML_OP_SET_ROWS;
    nk::word_hash h;
    const int     n_src = neuron_n_src(node);
    h.add(nk::hash_op(neuron_op_desc(node)));
    h.add((uint64_t) n_src << 1 | (node->view_src != nullptr));
    if (!neuron_tensor_words(node, words)) {
        return 0;
    }
    add_words(h, words, writes ? n_written_words(kind) : n);
    for (int i = 0; i < n_src; i++) {
        if (!node->src[i]) {
            h.add(nk::ABSENT_WORD);
            continue;
        }
        if (!neuron_tensor_words(node->src[i], words)) {
            return 0;
        }
        add_words(h, words, writes && i == (int) NEURON_SET_ROWS_INTO ? n_written_words(kind) : n);
    }
    const neuron_params params =
        kind == neuron_token_kind::WITH_NUMBERS ? neuron_params_of(node) : neuron_open_params_of(node);
    add_words(h, params.data(), nk::PARAM_WORDS);
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

static std::vector<uint64_t> tokens_of(const neuron_key & key, neuron_token_kind kind) {
    std::vector<uint64_t> tokens;
    tokens.reserve(key.nodes.size());
    for (const neuron_key_node & node : key.nodes) {
        tokens.push_back(token_of(node, kind));
    }
    return tokens;
}

// Returns the element with these tokens among patterns or families, which are sorted longest first. Adds it if it is
// missing.
template <typename T> static T & find_or_add(std::vector<T> & all, const neuron_token_hashes & hashes) {
    const size_t n  = hashes.size();
    auto         it = std::find_if(all.begin(), all.end(), [&](const T & t) {
        return t.tokens.size() == n && t.tokens.part(0, n) == hashes.part(0, n);
    });
    if (it == all.end()) {
        it         = std::find_if(all.begin(), all.end(), [n](const T & t) { return t.tokens.size() < n; });
        it         = all.insert(it, T{});
        it->tokens = hashes;
    }
    return *it;
}

// Returns the bytes of all tensors of a graph's key.
static double size_of(const neuron_key & key) {
    double size = 0;
    for (const neuron_key_node & node : key.nodes) {
        size += (double) neuron_nbytes_of_words(node.tensor);
        for (const neuron_key_input & in : node.inputs) {
            size += in.tensor ? (double) neuron_nbytes_of_words(in.tensor) : 0.0;
        }
    }
    return size;
}

static uint64_t beginning(uint64_t token, int64_t n_columns) {
    nk::word_hash h;
    h.add(token);
    h.add((uint64_t) n_columns);
    return h.value();
}

void neuron_group_index::add_to_family(const neuron_key & key, const neuron_group_kernel & kernel) {
    const std::vector<uint64_t> tokens  = tokens_of(key, neuron_token_kind::WITHOUT_EXTENTS);
    const auto                  columns = (int64_t) key.nodes.front().tensor[1];
    auto &     all = find_or_add(families[beginning(tokens.front(), columns)], neuron_token_hashes(tokens)).kernels;
    const auto at =
        std::upper_bound(all.begin(), all.end(), kernel,
                         [](const neuron_group_kernel & a, const neuron_group_kernel & b) { return a.size < b.size; });
    all.insert(at, kernel);
}

// Returns a key node's signature, as neuron_signature_of does for a tensor; its parameters are not copied.
static neuron_signature signature_of(const neuron_key_node & node) {
    const neuron_key_ops & ops = neuron_key_ops::get();
    neuron_signature       s;
    s.op_hash          = node.op;
    s.op_params        = (const int32_t *) node.params;
    s.n_src            = (int) node.inputs.size();
    s.alias            = node.op == ops.set_rows ? 2 : node.op == ops.cpy ? 1 : NEURON_KERNELS_NO_ALIAS;
    s.tensors[s.n_src] = neuron_tensor_of_words(node.tensor);
    for (int i = 0; i < s.n_src; i++) {
        const neuron_key_input & in = node.inputs[(size_t) i];
        if (!in.tensor) {
            s.tensors[i].type = NEURON_KERNELS_ABSENT;
            continue;
        }
        s.tensors[i]        = neuron_tensor_of_words(in.tensor);
        const bool in_place = !node.is_own && node.to == in.to && node.offset == in.offset &&
                              in.tensor[0] == node.tensor[0] &&
                              neuron_nbytes_of_words(in.tensor) == neuron_nbytes_of_words(node.tensor);
        if (in_place && s.alias == NEURON_KERNELS_NO_ALIAS) {
            s.alias = i;
        }
    }
    return s;
}

bool neuron_group_index::has_member(const ggml_tensor * node) const {
    // a kernel's open node has the token of the node without numbers
    return members.count(neuron_token_of(node, neuron_token_kind::WITH_NUMBERS)) != 0 ||
           (open && neuron_has_numbers(node) && members.count(neuron_token_of(node)) != 0);
}

bool neuron_group_index::may_have_member(const ggml_tensor * node) const {
    neuron_signature    signature = neuron_signature_of(node);
    const neuron_params any       = neuron_open_params_of(node);
    const auto          is_like   = [&] {
        neuron_cut   cut;
        const auto * sizes = open_members.find(signature, cut);
        return sizes && std::any_of(sizes->begin(), sizes->end(), [&](const neuron_sizes & s) {
                   return (cut.rule->written >= 0 || s.n_more >= cut.n_more) && s.n * NEURON_MAX_PIECES >= cut.n;
               });
    };
    if (is_like()) {
        return true;
    }
    signature.op_params = (const int32_t *) any.data();
    return open && neuron_has_numbers(node) && is_like();
}

namespace {

// Lengths of a node that are shorter than a member's: numbers of tokens, cells or sequences, in any dimension.
class shorter_lengths {
  public:
    // Returns whether a node's tensors equal a member's tensors except for up to `most` lengths and their squares.
    bool are_all(const neuron_signature & node, const neuron_signature & member, size_t most) {
        for (int i = 0; i <= node.n_src; i++) {
            if (!add(node.tensors[i], member.tensors[i])) {
                return false;
            }
        }
        std::sort(pairs.begin(), pairs.end());
        pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
        const auto is_square = [this](const std::pair<int64_t, int64_t> & p) {
            return std::any_of(pairs.begin(), pairs.end(), [&](const auto & root) {
                return root != p && root.first * root.first == p.first && root.second * root.second == p.second;
            });
        };
        const auto n_squares = (size_t) std::count_if(pairs.begin(), pairs.end(), is_square);
        return !pairs.empty() && pairs.size() - n_squares <= most;
    }

  private:
    // Returns whether a tensor's axes have the same order as the member's, and no axis is longer.
    bool add(const neuron_kernels_tensor & t, const neuron_kernels_tensor & member) {
        if (t.type == NEURON_KERNELS_ABSENT) {
            return true;
        }
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            if (t.ne[i] > member.ne[i]) {
                return false;
            }
            if (t.ne[i] < member.ne[i]) {
                pairs.emplace_back(t.ne[i], member.ne[i]);
            }
            for (int j = 0; j < i; j++) {
                const bool open = t.ne[i] == 1 || t.ne[j] == 1;
                if (!open && (t.nb[i] < t.nb[j]) != (member.nb[i] < member.nb[j])) {
                    return false;
                }
            }
        }
        return true;
    }

    std::vector<std::pair<int64_t, int64_t>> pairs;  // the node's length and the member's
};

}  // namespace

// Returns how many lengths may differ: in attention the tokens and the positions that they attend to, in a mean the
// tokens and sequences. In other nodes, such as a product with other weights, only one may differ.
static size_t n_lengths(const neuron_signature & node, const neuron_signature & member) {
    const neuron_key_ops & ops     = neuron_key_ops::get();
    const bool             attends = node.op_hash == ops.flash_attn_ext || node.op_hash == ops.soft_max;
    const bool             product =
        node.op_hash == ops.mul_mat && (node.tensors[0].ne[2] > 1 || node.tensors[0].ne[1] == member.tensors[0].ne[1]);
    return attends || product ? 2 : 1;
}

bool neuron_group_index::may_have_shorter_member(const ggml_tensor * node) const {
    const auto found = shapes.find(neuron_token_of(node, neuron_token_kind::WITHOUT_EXTENTS));
    if (found == shapes.end()) {
        return false;
    }
    const neuron_signature own = neuron_signature_of(node);
    return std::any_of(found->second.begin(), found->second.end(), [&](const neuron_signature & member) {
        return member.n_src == own.n_src && shorter_lengths().are_all(own, member, n_lengths(own, member));
    });
}

void neuron_group_index::add(const neuron_key & key, const neuron_bundle * bundle, int32_t number) {
    const std::vector<uint64_t> tokens = tokens_of(key, neuron_token_kind::WHOLE);
    for (const neuron_key_node & node : key.nodes) {
        const bool is_new = members.insert(token_of(node, neuron_token_kind::WITH_NUMBERS)).second;
        open              = open || neuron_is_open(node);
        causal            = causal || neuron_causal_kernel(node).n_tokens;
        if (node.inputs.size() <= GGML_MAX_SRC) {
            if (is_new) {
                shapes[token_of(node, neuron_token_kind::WITHOUT_EXTENTS)].push_back(signature_of(node));
            }
            const auto       params = params_of(node);
            neuron_signature s      = signature_of(node);
            s.op_params             = (const int32_t *) params.data();
            open_members.add(s, bundle, number);
        }
    }
    const neuron_group_kernel kernel  = { key.words, key.n_words, bundle, number, size_of(key) };
    neuron_group_pattern &    pattern = find_or_add(patterns[tokens.front()], neuron_token_hashes(tokens));
    pattern.wirings.insert(neuron_wiring_hash(key.words, key.n_words));
    pattern.kernels.push_back(kernel);
    add_to_family(key, kernel);
}

const std::vector<neuron_group_pattern> * neuron_group_index::beginning_with(uint64_t token) const {
    const auto found = patterns.find(token);
    return found == patterns.end() ? nullptr : &found->second;
}

const std::vector<neuron_group_family> * neuron_group_index::families_beginning_with(uint64_t token,
                                                                                     int64_t  n_columns) const {
    const auto found = families.find(beginning(token, n_columns));
    return found == families.end() ? nullptr : &found->second;
}
