#include "select/group_key.h"

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "select/group_index.h"
#include "select/kernel_store.h"
#include "select/key_nodes.h"
#include "select/numbers.h"
#include "select/streams.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

bool neuron_is_watched(const ggml_cgraph * cgraph) {
    return !cgraph->uid && cgraph->n_leafs == 0 && cgraph->visited_hash_set.size != 0;
}

//
// results that are used outside of a group
//

namespace {

// The slots and nodes that hold the roots of a group's tensors.
class group_roots {
  public:
    group_roots(const ggml_cgraph * cgraph, const std::vector<int> & nodes, const neuron_streams * streams) {
        references.reserve(2 * nodes.size());
        for (size_t i = 0; i < nodes.size(); i++) {
            ggml_tensor * node = cgraph->nodes[nodes[i]];
            if (!node->view_src) {
                references.emplace(node, nk::graph_reference{ false, i });
            }
            if (streams && streams->result_of(node) != node) {
                references.emplace(streams->result_of(node), nk::graph_reference{ false, i });
            }
        }
    }

    // Returns the node whose memory a tensor is in, or -1.
    int64_t node_of(ggml_tensor * t) const {
        const auto found = references.find(neuron_root_of(t));
        return found == references.end() || found->second.is_slot ? -1 : (int64_t) found->second.index;
    }

    // Returns the reference to a tensor's root. A root without one gets a new slot, or the kernel's slot.
    nk::graph_reference refer(ggml_tensor *               t,
                              size_t                      begin,
                              size_t                      size,
                              bool                        writes,
                              const nk::graph_reference * kernels,
                              neuron_group &              group) {
        ggml_tensor * root  = neuron_root_of(t);
        const auto    found = references.emplace(root, nk::graph_reference{ true, group.slots.size() });
        auto          where = found.first->second;
        if (!where.is_slot) {
            return where;
        }
        if (kernels && kernels->is_slot && kernels->index <= group.slots.size()) {
            where = *kernels;
        }
        const size_t end = begin + size;
        if (where.index == group.slots.size()) {
            group.slots.push_back({ root, begin, end - begin, writes });
            return where;
        }
        neuron_group_slot & slot = group.slots[where.index];
        if (slot.tensor != root) {
            mixed = true;
        }
        const size_t last = std::max(end, slot.offset + slot.size);
        slot.offset       = std::min(slot.offset, begin);
        slot.size         = last - slot.offset;
        slot.written      = slot.written || writes;
        slot.summed       = slot.summed || (writes && neuron_is_all_reduce(t));
        return where;
    }

    // Returns whether no kernel can have these slots: a slot has several tensors, or a written tensor has several
    // slots.
    bool are_wrong(const neuron_group & group) const {
        std::unordered_map<const ggml_tensor *, std::pair<size_t, bool>>
            roots;  // with their slots, and whether one is written
        for (const neuron_group_slot & slot : group.slots) {
            auto & root = roots[slot.tensor];
            root.first++;
            root.second = root.second || slot.written;
        }
        return mixed || std::any_of(roots.begin(), roots.end(),
                                    [](const auto & root) { return root.second.first > 1 && root.second.second; });
    }

  private:
    std::unordered_map<const ggml_tensor *, nk::graph_reference> references;
    bool                                                         mixed = false;  // a slot has several tensors
};

}  // namespace

int64_t neuron_uses_in_graph(const ggml_cgraph * cgraph, const ggml_tensor * t) {
    const ggml_hash_set & set = cgraph->visited_hash_set;
    if (!set.size || !cgraph->use_counts) {
        return -1;
    }
    const size_t at = ggml_hash_find(&set, t);
    return at != GGML_HASHSET_FULL && ggml_bitset_get(set.used, at) ? cgraph->use_counts[at] : -1;
}

// Returns ggml's nodes from the group's first node to its last one.
static std::vector<ggml_tensor *> nodes_between(const ggml_cgraph *      cgraph,
                                                const std::vector<int> & nodes,
                                                const neuron_streams *   streams) {
    std::vector<ggml_tensor *> all;
    for (int i = nodes.front(); i <= nodes.back(); i++) {
        ggml_tensor * node = streams ? streams->node(i) : cgraph->nodes[i];
        if (all.empty() || all.back() != node) {
            all.push_back(node);
        }
    }
    return all;
}

// Returns how often some nodes use each tensor of the group as a source.
static std::unordered_map<const ggml_tensor *, int64_t> count_uses(const std::vector<ggml_tensor *> & nodes,
                                                                   const group_roots &                roots) {
    std::unordered_map<const ggml_tensor *, int64_t> uses;
    for (const ggml_tensor * node : nodes) {
        for (ggml_tensor * src : node->src) {
            if (src && roots.node_of(src) >= 0) {
                uses[src]++;
            }
        }
    }
    return uses;
}

// Returns which nodes with their own memory escape: other nodes use them or views of them, no node uses them, they are
// outputs, or the program examines them.
static std::vector<bool> find_escapes(const ggml_cgraph *      cgraph,
                                      const std::vector<int> & nodes,
                                      const group_roots &      roots,
                                      const neuron_streams *   streams,
                                      bool                     watched) {
    std::vector<bool> escapes(nodes.size());
    const auto        all_nodes = nodes_between(cgraph, nodes, streams);
    auto              uses      = count_uses(all_nodes, roots);
    for (ggml_tensor * t : all_nodes) {
        const int64_t node = roots.node_of(t);
        // a node that reads a sum has the summand as its source
        if (node < 0 || escapes[(size_t) node] || neuron_is_all_reduce(t)) {
            continue;
        }
        const int64_t all      = neuron_uses_in_graph(cgraph, t);
        escapes[(size_t) node] = all <= 0 || uses[t] < all || (t->flags & GGML_TENSOR_FLAG_OUTPUT);
    }
    if (watched) {
        ggml_tensor * last   = cgraph->nodes[cgraph->n_nodes - 1];
        const auto    escape = [&](ggml_tensor * t) {
            if (t && roots.node_of(t) >= 0) {
                escapes[(size_t) roots.node_of(t)] = true;
            }
        };
        escape(last);
        std::for_each(std::begin(last->src), std::end(last->src), escape);
    }
    return escapes;
}

//
// keys
//

namespace {

// A word of a key for an offset from the beginning of its slot. The offset is computed after all uses are found.
struct late_offset {
    size_t word;
    size_t slot;
};

class group_key {
  public:
    group_key(const ggml_cgraph *    cgraph,
              bool                   watched,
              const uint64_t *       kernel,
              neuron_variant         variant,
              const neuron_streams * streams,
              neuron_group &         group) :
        cgraph(cgraph), group(group), kernel(kernel ? nk::first_graph_node(kernel) : nullptr), variant(variant),
        roots(cgraph, group.nodes, streams), escapes(find_escapes(cgraph, group.nodes, roots, streams, watched)) {}

    // Returns an empty key when no kernel can have such nodes.
    std::vector<uint64_t> make() {
        group.slots.clear();
        group.results.clear();
        for (size_t i = 0; i < group.nodes.size(); i++) {
            if (!add_node(cgraph->nodes[group.nodes[i]], escapes[i])) {
                return {};
            }
        }
        if (roots.are_wrong(group)) {
            return {};
        }
        for (const late_offset & l : late) {
            nodes[l.word] -= group.slots[l.slot].offset;
        }
        std::vector<uint64_t> words = { nk::hash_op(nk::GRAPH), group.nodes.size() | (uint64_t) group.slots.size()
                                                                                         << 32 };
        words.reserve(2 + group.slots.size() + nodes.size());
        for (const neuron_group_slot & slot : group.slots) {
            words.push_back(slot.size);
        }
        words.insert(words.end(), nodes.begin(), nodes.end());
        return words;
    }

  private:
    // Sets two words: the slot or node that a tensor refers to, and the offset in it. If `kernels` is set, its word
    // gives the slot.
    void refer(ggml_tensor * t, neuron_range rows, bool writes, const uint64_t * kernels, size_t at) {
        const nk::graph_reference has       = nk::read_reference(kernels ? *kernels : 0);
        const size_t              row       = t->nb[NEURON_SET_ROWS_AXIS];
        const size_t              begin     = neuron_offset_of(t) + (size_t) rows.first * row;
        const size_t              size      = rows.n ? (size_t) rows.n * row : ggml_nbytes(t);
        const nk::graph_reference reference = roots.refer(t, begin, size, writes, kernels ? &has : nullptr, group);
        nodes[at]                           = nk::reference_word(reference) + writes;
        nodes[at + 1]                       = begin;
        if (reference.is_slot) {
            late.push_back({ at + 1, reference.index });
        }
    }

    bool add_tensor(const ggml_tensor * t, int64_t n_rows) {
        const size_t at = nodes.size();
        nodes.resize(at + nk::TENSOR_WORDS);
        if (!n_rows) {
            return neuron_tensor_words(t, &nodes[at]);
        }
        ggml_tensor rows              = *t;
        rows.ne[NEURON_SET_ROWS_AXIS] = n_rows;
        return neuron_tensor_words(&rows, &nodes[at]);
    }

    // Returns the rows of a SET_ROWS's destination that the group has: the rows that its other nodes read, which are
    // the first ones or a sequence's own cache. Returns an empty range when the group has all rows. It also has all
    // rows when a node's stride is longer than a row, as over values without flash attention and over streams: the
    // strides then contain the full length.
    neuron_range rows_of(const ggml_tensor * node) const {
        const ggml_tensor * into = node->op == GGML_OP_SET_ROWS ? node->src[NEURON_SET_ROWS_INTO] : nullptr;
        if (!variant.first_rows || !into || into->ne[2] != 1 || into->ne[3] != 1) {
            return {};
        }
        const size_t row   = into->nb[NEURON_SET_ROWS_AXIS];
        const size_t begin = neuron_offset_of(into);
        if (row != ggml_row_size(into->type, into->ne[0]) || neuron_offset_of(node) != begin) {
            return {};
        }
        const auto [first, end] = bytes_read_of(into);
        if (first == SIZE_MAX || first < begin || (first - begin) % row != 0) {
            return {};
        }
        const auto n = (int64_t) ((end - first + row - 1) / row);
        return n < into->ne[NEURON_SET_ROWS_AXIS] ? neuron_range{ (int64_t) ((first - begin) / row), n }
                                                  : neuron_range{};
    }

    // Returns the range of bytes of a written tensor that the group's nodes read. SIZE_MAX: they read none, or a node's
    // stride is longer than a row.
    std::pair<size_t, size_t> bytes_read_of(const ggml_tensor * into) const {
        size_t first = SIZE_MAX;
        size_t end   = neuron_offset_of(into);
        for (const int i : group.nodes) {
            const ggml_tensor * reader = cgraph->nodes[i];
            for (int s = 0; s < neuron_n_src(reader); s++) {
                const ggml_tensor * t = reader->src[s];
                if (!t || neuron_root_of(t) != neuron_root_of(into) || reader->op == GGML_OP_SET_ROWS) {
                    continue;
                }
                if (steps_further(t, into->nb[NEURON_SET_ROWS_AXIS])) {
                    return { SIZE_MAX, end };
                }
                first = std::min(first, neuron_offset_of(t));
                end   = std::max(end, neuron_offset_of(t) + ggml_nbytes(t));
            }
        }
        return { first, end };
    }

    static bool steps_further(const ggml_tensor * t, size_t row) {
        for (int axis = 1; axis < GGML_MAX_DIMS; axis++) {
            if (t->ne[axis] > 1 && t->nb[axis] > row) {
                return true;
            }
        }
        return false;
    }

    bool add_node(ggml_tensor * node, bool escaping) {
        const int        n_src  = neuron_n_src(node);
        const size_t     head   = nodes.size();
        const uint64_t * result = kernel ? kernel + 2 : nullptr;
        const uint64_t * inputs = nullptr;
        if (kernel) {
            const nk::graph_node its = nk::read_graph_node(kernel);
            if (its.n_inputs != (uint64_t) n_src || (its.result != 0) != (node->view_src != nullptr)) {
                return false;
            }
            inputs = its.inputs;
            kernel = its.end;
        }
        nodes.insert(nodes.end(),
                     { nk::hash_op(neuron_op_desc(node)), (uint64_t) n_src | (uint64_t) escaping << 32, 0, 0 });
        const neuron_range rows = rows_of(node);
        if (!add_tensor(node, rows.n) || !add_sources(node, rows, inputs)) {
            return false;
        }
        add_params(node);
        if (node->view_src) {
            refer(node, rows, true, result, head + 2);
        }
        if (escaping) {
            group.results.push_back({ node, ggml_nbytes(node) });
        }
        return true;
    }

    // inputs  the kernel's inputs
    bool add_sources(ggml_tensor * node, neuron_range rows, const uint64_t * inputs) {
        for (int i = 0; i < neuron_n_src(node); i++) {
            const uint64_t * its = inputs;
            if (inputs && (nk::next_graph_input(inputs) != nullptr) != (node->src[i] != nullptr)) {
                return false;
            }
            if (!node->src[i]) {
                nodes.push_back(nk::ABSENT_WORD);
                continue;
            }
            const neuron_range own = i == (int) NEURON_SET_ROWS_INTO ? rows : neuron_range{};
            const size_t       at  = nodes.size();
            nodes.resize(at + nk::GRAPH_INPUT_WORDS);
            refer(node->src[i], own, false, its, at);
            if (!add_tensor(node->src[i], own.n)) {
                return false;
            }
        }
        return true;
    }

    void add_params(const ggml_tensor * node) {
        const size_t params = nodes.size();
        nodes.resize(params + nk::PARAM_WORDS);
        const neuron_params own = variant.open ? neuron_open_params_of(node) : neuron_params_of(node);
        std::copy(own.begin(), own.end(), nodes.begin() + (std::ptrdiff_t) params);
        if (variant.causal && neuron_may_be_causal(node)) {
            nodes[params + NEURON_CAUSAL_WORD] |= NEURON_CAUSAL_BIT;
        }
    }

    const ggml_cgraph *      cgraph;
    neuron_group &           group;
    const uint64_t *         kernel;  // the next node of the kernel; NULL: slots are numbered by first use
    const neuron_variant     variant;
    group_roots              roots;
    const std::vector<bool>  escapes;
    std::vector<uint64_t>    nodes;
    std::vector<late_offset> late;
};

}  // namespace

std::vector<uint64_t> neuron_group_words(const ggml_cgraph *    cgraph,
                                         bool                   watched,
                                         neuron_group &         group,
                                         const uint64_t *       kernel,
                                         neuron_variant         variant,
                                         const neuron_streams * streams) {
    return group_key(cgraph, watched, kernel, variant, streams, group).make();
}
