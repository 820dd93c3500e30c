#include "select/group_pieces.h"

#include "../../bundle/src/key.h"
#include "select/tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

static constexpr int N_DIMS = 4;

//
// the piece that a kernel computes
//

namespace {

// Makes the key of a piece. A stride is the group's if both tensors have more than one element along the axis, else the
// kernel's.
class piece_key {
  public:
    piece_key(const neuron_key & group, const neuron_key & kernel) :
        words(kernel.words, kernel.words + kernel.n_words), group(group), kernel(kernel), sizes(group.n_slots()) {}

    // Returns false when there is no piece, or when the piece would have all tokens.
    bool make() {
        for (size_t i = 0; i < group.nodes.size(); i++) {
            if (!add_node(group.nodes[i], kernel.nodes[i])) {
                return false;
            }
        }
        std::copy(sizes.begin(), sizes.end(), words.begin() + 2);
        return cut.first > 0 &&
               std::all_of(lengths.begin(), lengths.end(), [this](int64_t length) { return length % cut.first == 0; });
    }

    std::vector<uint64_t>       words;
    std::pair<int64_t, int64_t> cut{};  // numbers of tokens of the group and of the kernel

  private:
    // Returns the piece's place for a tensor of the kernel.
    uint64_t * of_piece(const uint64_t * b) { return words.data() + (b - kernel.words); }

    // Notes an extent of the group and a smaller one of the kernel. All such pairs must have the same ratio.
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

    // Sets a tensor's extents. Returns NULL when an extent is not allowed.
    uint64_t * add_extents(const uint64_t * a, const uint64_t * b) {
        uint64_t * to    = of_piece(b);
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

    void use(const nk::graph_reference & reference, uint64_t offset, const uint64_t * tensor) {
        if (reference.is_slot) {
            sizes[reference.index] = std::max(sizes[reference.index], offset + neuron_nbytes_of_words(tensor));
        }
    }

    // Sets the strides of a tensor in another tensor's memory.
    bool add_strides(const uint64_t * a, const uint64_t * b, uint64_t * to, const nk::graph_reference & reference) {
        if (has_extents(to, b)) {
            return true;
        }
        if (has_extents(to, a) || reference.is_slot) {
            std::copy(a + 5, a + 5 + N_DIMS, to + 5);
            return canonicalize(to);
        }
        // Results have their own memory, without gaps.
        const uint64_t * its   = kernel.nodes[reference.index].tensor;
        const uint64_t * piece = of_piece(its);
        for (int i = 0; i < N_DIMS; i++) {  // a view with the axes in some order
            int axis = 0;
            while (axis < N_DIMS && (its[1 + axis] == 1 || its[5 + axis] != b[5 + i])) {
                axis++;
            }
            if (b[1 + i] != 1 && axis == N_DIMS) {
                return false;
            }
            to[5 + i] = axis < N_DIMS ? piece[5 + axis] : to[5 + i];
        }
        return canonicalize(to);
    }

    bool add_node(const neuron_key_node & a, const neuron_key_node & b) {
        uint64_t * to = add_extents(a.tensor, b.tensor);
        if (!to) {
            return false;
        }
        if (a.is_own) {
            neuron_kernels_tensor dense = neuron_tensor_of_words(to);
            neuron_kernels_set_dense(&dense);
            std::copy(dense.nb, dense.nb + N_DIMS, to + 5);
            if (!canonicalize(to)) {
                return false;
            }
        } else if (!add_strides(a.tensor, b.tensor, to, a.to)) {
            return false;
        } else {
            use(a.to, b.offset, to);
        }
        for (size_t i = 0; i < a.inputs.size(); i++) {
            const neuron_key_input & in  = a.inputs[i];
            const neuron_key_input & its = b.inputs[i];
            if (!in.tensor) {
                continue;
            }
            uint64_t * input = add_extents(in.tensor, its.tensor);
            if (!input || !add_strides(in.tensor, its.tensor, input, in.to)) {
                return false;
            }
            use(in.to, its.offset, input);
        }
        return true;
    }

    const neuron_key &    group;
    const neuron_key &    kernel;
    std::vector<uint64_t> sizes;    // of slots
    std::vector<int64_t>  lengths;  // the group's lengths that are cut
};

//
// memory that the group writes and reads
//

// Finds where a group writes rows of memory and reads them. Without flash attention it follows the scores from the
// product with a cache of keys to the mask, and from there to the product with a cache of values.
class cache_uses {
  public:
    explicit cache_uses(const neuron_key & key) : nodes(key.nodes.begin(), key.nodes.end()), written(key.n_slots()) {
        for (const node & n : nodes) {
            if (n.key.is_in_slot()) {
                written[n.key.to.index] = true;
            }
        }
    }

    // Returns false when something is written or read in another way.
    bool find(std::vector<neuron_group_causal_condition> & causal_conditions) {
        for (size_t i = 0; i < nodes.size(); i++) {
            if (!(nodes[i].key.is_in_slot() ? add_writer(i) : add_reader(i))) {
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
        explicit node(const neuron_key_node & key) : key(key) {}

        const neuron_key_node &                  key;
        std::optional<read>                      scores;  // scores of these cells, which no mask has hidden yet
        std::optional<std::pair<size_t, size_t>> mask;    // a node and its source: the mask whose cells are the columns
    };

    // Returns the node if an input is a whole node, unchanged; else NULL.
    const node * node_of(const neuron_key_input & in) const {
        if (!in.is_in_node() || in.offset != 0) {
            return nullptr;
        }
        const node & n = nodes[in.to.index];
        return std::equal(in.tensor, in.tensor + nk::TENSOR_WORDS, n.key.tensor) ? &n : nullptr;
    }

    // Returns whether an input is in the memory of scores.
    bool has_scores(const neuron_key_input & in) const { return in.is_in_node() && nodes[in.to.index].scores; }

    bool is_written(const neuron_key_input & in) const { return in.is_in_slot() && written[in.to.index]; }

    bool add_writer(size_t i) {
        const neuron_key_node & n    = nodes[i].key;
        const uint64_t *        t    = n.tensor;
        const auto *            type = nk::find_type((int64_t) t[0]);
        const uint64_t          slot = n.to.index;
        const bool late   = std::any_of(reads.begin(), reads.end(), [&](const read & r) { return r.slot == slot; });
        const bool matrix = t[3] == 1 && t[4] == 1 && t[5] == type->size;
        for (size_t s = 0; s < n.inputs.size(); s++) {
            const neuron_key_input & in = n.inputs[s];
            if (has_scores(in) || (is_written(in) && (s < 2 || in.to.index != slot))) {
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

    // Returns whether a slot's cells have scores that no mask has hidden yet.
    bool pending_of(uint64_t slot) const {
        return std::any_of(nodes.begin(), nodes.end(),
                           [slot](const node & n) { return n.scores && n.scores->slot == slot; });
    }

    void add_read(read r, std::pair<size_t, size_t> mask) {
        r.reader = mask.first;
        r.mask   = mask.second;
        reads.push_back(r);
    }

    static read read_of(const neuron_key_input & in, int axis) { return { in.to.index, in.offset, in.tensor, axis }; }

    bool is_mask(size_t i, size_t source) const {
        const auto & inputs = nodes[i].key.inputs;
        return source < inputs.size() && inputs[source].is_in_slot() && !is_written(inputs[source]);
    }

    bool add_reader(size_t i) {
        const neuron_key_ops &  ops = neuron_key_ops::get();
        const neuron_key_node & n   = nodes[i].key;
        if (n.op == ops.mul_mat) {
            return add_product(i);
        }
        const bool masked = n.op == ops.soft_max && is_mask(i, NEURON_SOFT_MAX_MASK);
        // the scores pass through unchanged
        for (size_t s = 0; s < n.inputs.size(); s++) {
            const neuron_key_input & in = n.inputs[s];
            if (in.to.index == i || !has_scores(in)) {
                continue;
            }
            const node * from = node_of(in);
            if (!from || s != 0 || n.escapes) {
                return false;
            }
            if (masked) {
                add_read(*from->scores, { i, NEURON_SOFT_MAX_MASK });
            } else if (n.op == ops.scale || n.op == ops.tanh) {
                nodes[i].scores = from->scores;
            } else {
                return false;
            }
        }
        if (masked) {
            nodes[i].mask = { i, NEURON_SOFT_MAX_MASK };
        }
        return add_attention(i);
    }

    // A product with a cache of keys, or a product of a cache of values with masked weights.
    bool add_product(size_t i) {
        const neuron_key_node & n = nodes[i].key;
        if (n.inputs.size() != 2 || !n.inputs[0].tensor || !n.inputs[1].tensor || is_written(n.inputs[1]) ||
            has_scores(n.inputs[0]) || has_scores(n.inputs[1])) {
            return false;
        }
        if (!is_written(n.inputs[0])) {
            return true;
        }
        const node * weights = node_of(n.inputs[1]);
        if (weights && weights->mask) {
            add_read(read_of(n.inputs[0], 0), *weights->mask);
            return true;
        }
        nodes[i].scores = read_of(n.inputs[0], 1);
        return !n.escapes && n.is_own;
    }

    // An op whose rule names the mask and the sources' axis of cells.
    bool add_attention(size_t i) {
        const neuron_key_node & n     = nodes[i].key;
        const auto              rules = neuron_token_rules(n.op);
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
    std::vector<bool>  written;  // by slot
    std::vector<write> writes;
    std::vector<read>  reads;
};

}  // namespace

// Returns the bytes per token of a slot that is cut, or 0 for a whole one.
static size_t row_of(const neuron_group_room & room, int64_t n) {
    return room.kind == neuron_group_room::ROWS ? room.period / (size_t) n : 0;
}

bool neuron_fit_pieces(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit) {
    piece_key key(group, kernel);
    if (!key.make()) {
        return false;
    }
    const neuron_key piece(key.words.data(), key.words.size());
    neuron_group_fit rows;
    if (!neuron_fit_rows(piece, group, rows) || !neuron_fit_whole(piece, kernel, fit)) {
        return false;
    }
    std::tie(fit.n, fit.n_kernel) = key.cut;
    for (size_t i = 0; i < rows.slots.size(); i++) {
        neuron_group_room & room = fit.slots[i];
        if (room.kind == neuron_group_room::ROWS) {
            return false;  // the kernel has more bytes of another slot
        }
        const bool masked = room.kind == neuron_group_room::WIDER;
        room.row          = masked ? room.size / (size_t) fit.n_kernel : row_of(rows.slots[i], fit.n_kernel);
    }
    for (size_t i = 0; i < rows.results.size(); i++) {
        if (fit.results[i].kind != neuron_group_room::NONE) {
            return false;
        }
        fit.results[i].row = row_of(rows.results[i], fit.n_kernel);
    }
    return cache_uses(group).find(fit.causal_conditions);
}
