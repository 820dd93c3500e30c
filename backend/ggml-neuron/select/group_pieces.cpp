#include "select/group_pieces.h"

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "select/tokens.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

static constexpr int N_DIMS = 4;

//
// what a kernel is to compute
//

namespace {

// Makes the key of a piece: where both have more than one element of it, the group's strides; else the kernel's.
class piece_key {
  public:
    piece_key(const uint64_t * group, const uint64_t * kernel, size_t n_words) :
        words(kernel, kernel + n_words), group(group), kernel(kernel), n_words(n_words) {}

    // Returns false when there is none, or when the piece would have all tokens.
    bool make() {
        if (group[0] != kernel[0] || group[1] != kernel[1]) {
            return false;
        }
        sizes.resize((size_t) (group[1] >> 32));
        const uint64_t * a = nk::first_graph_node(group);
        for (const uint64_t * b = nk::first_graph_node(kernel); b < kernel + n_words;) {
            const nk::graph_node of_group  = nk::read_graph_node(a);
            const nk::graph_node of_kernel = nk::read_graph_node(b);
            if (of_group.end - a != of_kernel.end - b || of_group.end > group + n_words ||
                !add_node(of_group, of_kernel)) {
                return false;
            }
            a = of_group.end;
            b = of_kernel.end;
        }
        std::copy(sizes.begin(), sizes.end(), words.begin() + 2);
        return cut.first > 0 &&
               std::all_of(lengths.begin(), lengths.end(), [this](int64_t length) { return length % cut.first == 0; });
    }

    std::vector<uint64_t>       words;
    std::pair<int64_t, int64_t> cut{};  // tokens of the group and of the kernel

  private:
    // Results have memory of their own, without gaps.
    struct result {
        const uint64_t * kernel;
        const uint64_t * piece;
    };

    // Notes that the group has more of something; all that it has more of must be as many times as much.
    bool note(int64_t more, int64_t fewer) {
        if (cut.first && more * cut.second != fewer * cut.first) {
            return false;
        }
        lengths.push_back(more);
        if (!cut.first || more < cut.first) {
            cut = { more, fewer };
        }
        return true;
    }

    // Sets a tensor's extents. Returns NULL when it has other ones than it may have.
    uint64_t * add_extents(const uint64_t * a, const uint64_t * b) {
        uint64_t * to    = words.data() + (b - kernel);
        int        n_cut = 0;
        for (int i = 1; i <= N_DIMS; i++) {
            if (a[i] > b[i]) {
                n_cut++;
                if (!note((int64_t) a[i], (int64_t) b[i])) {
                    return nullptr;
                }
            }
            to[i] = std::min(a[i], b[i]);
        }
        return a[0] == b[0] && n_cut <= 1 ? to : nullptr;
    }

    static bool canonicalize(uint64_t * tensor) {
        int64_t ne[N_DIMS];
        std::copy(tensor + 1, tensor + 1 + N_DIMS, ne);
        return nk::canonicalize(*nk::find_type((int64_t) tensor[0]), ne, tensor + 5);
    }

    static bool has_extents(const uint64_t * tensor, const uint64_t * other) {
        return std::equal(tensor + 1, tensor + 1 + N_DIMS, other + 1);
    }

    void use(const uint64_t * reference, const uint64_t * tensor) {
        const nk::graph_reference to = nk::read_reference(reference[0]);
        if (to.is_slot) {
            sizes[to.index] = std::max(sizes[to.index], reference[1] + neuron_nbytes_of_words(tensor));
        }
    }

    // Sets the strides of a tensor that is in another one's memory.
    bool add_strides(const uint64_t *            a,
                     const uint64_t *            b,
                     uint64_t *                  to,
                     const nk::graph_reference & reference) const {
        if (has_extents(to, b)) {
            return true;
        }
        if (has_extents(to, a) || reference.is_slot) {
            std::copy(a + 5, a + 5 + N_DIMS, to + 5);
            return canonicalize(to);
        }
        const result & of = results[reference.index];
        for (int i = 0; i < N_DIMS; i++) {  // a view with its axes in some order
            int axis = 0;
            while (axis < N_DIMS && (of.kernel[1 + axis] == 1 || of.kernel[5 + axis] != b[5 + i])) {
                axis++;
            }
            if (b[1 + i] != 1 && axis == N_DIMS) {
                return false;
            }
            to[5 + i] = axis < N_DIMS ? of.piece[5 + axis] : to[5 + i];
        }
        return canonicalize(to);
    }

    bool add_node(const nk::graph_node & a, const nk::graph_node & b) {
        uint64_t * to = add_extents(a.tensor, b.tensor);
        if (!to || a.n_inputs != b.n_inputs || a.result != b.result) {
            return false;
        }
        if (!a.result) {
            neuron_kernels_tensor dense{};
            dense.type = (int32_t) to[0];
            std::copy(to + 1, to + 1 + N_DIMS, dense.ne);
            neuron_kernels_set_dense(&dense);
            std::copy(dense.nb, dense.nb + N_DIMS, to + 5);
            if (!canonicalize(to)) {
                return false;
            }
        } else if (!add_strides(a.tensor, b.tensor, to, nk::read_reference(a.result - 1))) {
            return false;
        }
        const size_t     self   = results.size();
        const uint64_t * from_a = a.inputs;
        const uint64_t * from_b = b.inputs;
        results.push_back({ b.tensor, to });
        if (a.result) {
            const uint64_t where[] = { a.result - 1, b.tensor[-1] };
            use(where, to);
        }
        for (uint64_t i = 0; i < a.n_inputs; i++) {
            const uint64_t * reference = from_b;
            const bool       same      = from_a[0] == from_b[0];
            const uint64_t * of_group  = nk::next_graph_input(from_a);
            const uint64_t * of_kernel = nk::next_graph_input(from_b);
            if (!same || !of_group || !of_kernel) {
                if (same && !of_group && !of_kernel) {
                    continue;
                }
                return false;
            }
            uint64_t *                input = add_extents(of_group, of_kernel);
            const nk::graph_reference where = nk::read_reference(reference[0]);
            if (!input || (!where.is_slot && where.index > self) || !add_strides(of_group, of_kernel, input, where)) {
                return false;
            }
            use(reference, input);
        }
        return true;
    }

    const uint64_t *      group;
    const uint64_t *      kernel;
    const size_t          n_words;
    std::vector<uint64_t> sizes;    // of slots
    std::vector<result>   results;
    std::vector<int64_t>  lengths;  // of the group, that are cut
};

//
// memory that is written and read
//

struct node_input {
    bool                is_there = false;
    nk::graph_reference to{};
    uint64_t            offset = 0;
    const uint64_t *    tensor = nullptr;
};

// Finds where a group writes rows of memory and reads them. Scores without flash attention are followed from the product with a
// cache of keys to the mask, and from there to the product with a cache of values.
class cache_uses {
  public:
    explicit cache_uses(const uint64_t * key, size_t n_words) {
        for (const uint64_t * words = nk::first_graph_node(key); words < key + n_words;) {
            node n;
            n.words                = nk::read_graph_node(words);
            n.offset               = words[3];
            const uint64_t * input = n.words.inputs;
            for (uint64_t i = 0; i < n.words.n_inputs; i++) {
                const uint64_t * from = input;
                node_input       in;
                in.tensor   = nk::next_graph_input(input);
                in.is_there = in.tensor != nullptr;
                if (in.is_there) {
                    in.to     = nk::read_reference(from[0]);
                    in.offset = from[1];
                }
                n.inputs.push_back(in);
            }
            words = n.words.end;
            nodes.push_back(std::move(n));
        }
        written.resize((size_t) (key[1] >> 32));
        for (const node & n : nodes) {
            if (n.is_in_slot()) {
                written[n.result().index] = true;
            }
        }
    }

    // Returns false when something is written or read in another way.
    bool find(std::vector<neuron_group_causal_condition> & causal_conditions) {
        for (size_t i = 0; i < nodes.size(); i++) {
            if (!(nodes[i].is_in_slot() ? add_writer(i) : add_reader(i))) {
                return false;
            }
        }
        for (const write & w : writes) {
            for (const read & r : reads) {
                if (r.slot == w.slot) {
                    neuron_group_causal_condition h{ w.node, r.reader, r.mask, w.cells };
                    int64_t                       ne[N_DIMS];
                    std::copy(r.tensor + 1, r.tensor + 1 + N_DIMS, ne);
                    h.cells.offset -= (int64_t) r.offset;
                    if (!h.cells.set_axes(ne, r.tensor + 5, r.axis)) {
                        return false;
                    }
                    causal_conditions.push_back(h);
                }
            }
        }
        return true;
    }

  private:
    struct write {
        uint64_t        slot;
        size_t          node;
        neuron_cell_map cells;
    };

    // A tensor with an axis of cells, and the mask that hides some of them.
    struct read {
        uint64_t         slot;
        uint64_t         offset;
        const uint64_t * tensor;
        int              axis;
        size_t           reader = 0;
        size_t           mask   = 0;
    };

    struct node {
        nk::graph_node                           words;
        uint64_t                                 offset = 0;  // of the result in what it is written to
        std::vector<node_input>                  inputs;
        std::optional<read>                      scores;      // of these cells, which nothing hides yet
        std::optional<std::pair<size_t, size_t>> mask;        // whose cells the columns are: a node and its source

        nk::graph_reference result() const { return nk::read_reference(words.result - 1); }

        bool is_in_slot() const { return words.result != 0 && result().is_slot; }
    };

    // Returns the node that an input is, all of it as it is; NULL when it is something else.
    node * node_of(const node_input & in) {
        if (!in.is_there || in.to.is_slot || in.offset != 0) {
            return nullptr;
        }
        node & n = nodes[in.to.index];
        return std::equal(in.tensor, in.tensor + nk::TENSOR_WORDS, n.words.tensor) ? &n : nullptr;
    }

    bool is_written(const node_input & in) const { return in.is_there && in.to.is_slot && written[in.to.index]; }

    bool add_writer(size_t i) {
        const node &     n    = nodes[i];
        const uint64_t * t    = n.words.tensor;
        const auto *     type = nk::find_type((int64_t) t[0]);
        const uint64_t   slot = n.result().index;
        const bool       late = std::any_of(reads.begin(), reads.end(), [&](const read & r) { return r.slot == slot; });
        const bool       matrix = t[3] == 1 && t[4] == 1 && t[5] == type->size;
        for (size_t s = 0; s < n.inputs.size(); s++) {
            if (is_written(n.inputs[s]) && (s < 2 || n.inputs[s].to.index != slot)) {
                return false;
            }
            const node * from =
                !n.inputs[s].is_there || n.inputs[s].to.is_slot ? nullptr : &nodes[n.inputs[s].to.index];
            if (from && from->scores) {
                return false;
            }
        }
        if (late || pending_of(slot) || !matrix || t[1] % type->block != 0) {
            return false;
        }
        write w{ slot, i, {} };
        w.cells.offset     = (int64_t) n.offset;
        w.cells.row_stride = t[6];
        w.cells.row_size   = t[1] / type->block * type->size;
        writes.push_back(w);
        return true;
    }

    // Returns whether there are scores of a slot's cells.
    bool pending_of(uint64_t slot) const {
        return std::any_of(nodes.begin(), nodes.end(),
                           [slot](const node & n) { return n.scores && n.scores->slot == slot; });
    }

    void add_read(read r, std::pair<size_t, size_t> mask) {
        r.reader = mask.first;
        r.mask   = mask.second;
        reads.push_back(r);
    }

    static read read_of(const node_input & in, int axis) { return { in.to.index, in.offset, in.tensor, axis }; }

    bool is_mask(size_t i, size_t source) const {
        const auto & inputs = nodes[i].inputs;
        return source < inputs.size() && inputs[source].is_there && inputs[source].to.is_slot &&
               !is_written(inputs[source]);
    }

    bool add_reader(size_t i) {
        static const uint64_t mul_mat  = nk::hash_op("mul_mat");
        static const uint64_t soft_max = nk::hash_op("soft_max");
        static const uint64_t scale    = nk::hash_op("scale");
        static const uint64_t tanh     = nk::hash_op("tanh");
        node &                n        = nodes[i];
        if (n.words.op == mul_mat) {
            return add_product(i);
        }
        // scores go on as they are
        for (size_t s = 0; s < n.inputs.size(); s++) {
            const node_input & in = n.inputs[s];
            if (!in.is_there || in.to.is_slot || in.to.index == i || !nodes[in.to.index].scores) {
                continue;
            }
            const node * from = node_of(in);
            if (!from || s != 0 || n.words.escapes) {
                return false;
            }
            if (n.words.op == soft_max && is_mask(i, 1)) {
                add_read(*from->scores, { i, 1 });
            } else if (n.words.op == scale || n.words.op == tanh) {
                n.scores = from->scores;
            } else {
                return false;
            }
        }
        if (n.words.op == soft_max && is_mask(i, 1)) {
            n.mask = { i, 1 };
        }
        return add_attention(i);
    }

    // A product with a cache: of keys, or of values with what a mask has weighed.
    bool add_product(size_t i) {
        node & n = nodes[i];
        if (n.inputs.size() != 2 || !n.inputs[0].is_there || !n.inputs[1].is_there || is_written(n.inputs[1])) {
            return false;
        }
        for (const node_input & in : n.inputs) {
            if (!in.to.is_slot && nodes[in.to.index].scores) {
                return false;
            }
        }
        if (!is_written(n.inputs[0])) {
            return true;
        }
        const node * weights = node_of(n.inputs[1]);
        if (weights && weights->mask) {
            add_read(read_of(n.inputs[0], 0), *weights->mask);
            return true;
        }
        n.scores = read_of(n.inputs[0], 1);
        return !n.words.escapes && n.words.result == 0;
    }

    // An op whose rule names the axis of cells of its sources, and the mask.
    bool add_attention(size_t i) {
        const node & n     = nodes[i];
        const auto   rules = neuron_token_rules(n.words.op);
        for (size_t s = 0; s < n.inputs.size(); s++) {
            if (!is_written(n.inputs[s])) {
                continue;
            }
            const auto rule = std::find_if(rules.first, rules.second, [&](const neuron_token_rule & r) {
                return s < NEURON_TOKEN_SOURCES && r.mask >= 0 && (int) s != r.mask && r.more[s] >= 0;
            });
            if (rule == rules.second || !is_mask(i, (size_t) rule->mask)) {
                return false;
            }
            add_read(read_of(n.inputs[s], rule->more[s]), { i, (size_t) rule->mask });
        }
        return true;
    }

    std::vector<node>  nodes;
    std::vector<bool>  written;  // slots
    std::vector<write> writes;
    std::vector<read>  reads;
};

}  // namespace

// Returns the bytes of a token in what is cut; 0 when it is whole.
static size_t row_of(const neuron_group_room & room, int64_t n) {
    return room.kind == neuron_group_room::ROWS ? room.period / (size_t) n : 0;
}

bool neuron_cut_group(const uint64_t * group, const uint64_t * kernel, size_t n_words, neuron_group_cut & cut) {
    piece_key piece(group, kernel, n_words);
    cut = {};
    if (!piece.make()) {
        return false;
    }
    cut.n        = piece.cut.first;
    cut.n_kernel = piece.cut.second;
    neuron_group_fit rows;
    if (!neuron_fit_rows(piece.words.data(), group, n_words, rows) ||
        !neuron_fit_group(piece.words.data(), kernel, n_words, cut.fit)) {
        return false;
    }
    for (size_t i = 0; i < rows.slots.size(); i++) {
        const auto kind = cut.fit.slots[i].kind;
        if (kind == neuron_group_room::ROWS) {
            return false;  // the kernel has more of something else
        }
        const bool masked = kind == neuron_group_room::MASK;
        cut.slot_rows.push_back(masked ? cut.fit.slots[i].size / (size_t) cut.n_kernel
                                       : row_of(rows.slots[i], cut.n_kernel));
    }
    for (size_t i = 0; i < rows.results.size(); i++) {
        if (cut.fit.results[i].kind != neuron_group_room::NONE) {
            return false;
        }
        cut.result_rows.push_back(row_of(rows.results[i], cut.n_kernel));
    }
    return cache_uses(group, n_words).find(cut.causal_conditions);
}
