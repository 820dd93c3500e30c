#include "select/group_lengths.h"

#include "../../bundle/src/key.h"
#include "select/tokens.h"

#include <algorithm>
#include <array>

namespace {

constexpr int N_DIMS = 4;

// What is beyond the group's elements along an axis of a tensor that the kernel has more of.
enum beyond : uint8_t {
    NOTHING,   // the kernel has as many
    REPEATED,  // the elements again, from the first on
    CELLS,     // those of a cache: finite, and to be masked
    MASKED,    // -inf: of a mask
    ZERO,      // what a mask hides, behind a SOFT_MAX
    ANYTHING,
};

using beyonds = std::array<beyond, N_DIMS>;

// A tensor as the group and as the kernel have it: nk::TENSOR_WORDS each.
struct tensor_pair {
    const uint64_t * group  = nullptr;
    const uint64_t * kernel = nullptr;

    int64_t ne(int axis) const { return (int64_t) group[1 + axis]; }

    int64_t more(int axis) const { return (int64_t) kernel[1 + axis]; }

    uint64_t nb(int axis) const { return kernel[5 + axis]; }

    bool is_longer(int axis) const { return ne(axis) != more(axis); }

    // Returns whether it is longer along other axes than these.
    bool is_longer_beside(int axis, int other = -1) const {
        for (int i = 0; i < N_DIMS; i++) {
            if (is_longer(i) && i != axis && i != other) {
                return true;
            }
        }
        return false;
    }

    bool is_longer() const { return is_longer_beside(-1); }

    bool has_same_extents(int axis, const tensor_pair & other, int its) const {
        return ne(axis) == other.ne(its) && more(axis) == other.more(its);
    }

    bool has_same_extents(const tensor_pair & other) const {
        return std::equal(group + 1, group + 1 + N_DIMS, other.group + 1) &&
               std::equal(kernel + 1, kernel + 1 + N_DIMS, other.kernel + 1);
    }

    // Returns whether an element of the group is at the same place in the kernel's tensor.
    bool is_in_place() const {
        for (int i = 0; i < N_DIMS; i++) {
            if (ne(i) != 1 && group[5 + i] != kernel[5 + i]) {
                return false;
            }
        }
        return true;
    }

    // Returns the only axis that is longer, when all beyond it have one element; or -1.
    int outermost() const {
        int found = -1;
        for (int i = 0; i < N_DIMS; i++) {
            if (found >= 0 && more(i) != 1) {
                return -1;
            }
            found = is_longer(i) ? i : found;
        }
        return found;
    }

    // Returns whether the kernel's type and extents are the group's or larger ones.
    bool fits() const {
        bool larger = group[0] == kernel[0];
        for (int i = 0; i < N_DIMS; i++) {
            larger = larger && more(i) >= ne(i);
        }
        return larger;
    }
};

struct input {
    bool                is_there = false;
    nk::graph_reference to{};
    uint64_t            offset        = 0;  // of the group's
    uint64_t            kernel_offset = 0;
    tensor_pair         tensor;
    beyonds             has{};

    bool is_longer() const { return is_there && tensor.is_longer(); }

    bool is_in_node() const { return is_there && !to.is_slot; }
};

struct node {
    const neuron_key_node & key;    // the group's
    tensor_pair             tensor;
    beyonds                 has{};  // what is in its memory
    std::vector<input>      inputs;

    // Columns of the matrix that its rows are to others, where the kernel has more columns and rows of it; 0s: they are none.
    std::pair<int64_t, int64_t> columns{};

    bool is_matrix() const { return columns.first > 0; }

    bool has_longer_inputs() const {
        return std::any_of(inputs.begin(), inputs.end(), [](const input & in) { return in.is_longer(); });
    }
};

struct slot {
    neuron_group_room room;
    size_t            size       = 0;      // bytes of the group
    size_t            added      = 0;      // ROWS: bytes from the end of its rows to that of the kernel's
    bool              is_fixed   = false;  // some use has no more
    bool              is_used    = false;
    bool              is_written = false;
};

// The axis of MUL_MAT's sources that is summed over.
constexpr int SUMMED = 0;

// What GET_ROWS looks up, a source, and where its result has rows.
constexpr size_t LOOKED_UP = 1;
constexpr int    ROWS_AXIS = 1;

// The axis of tokens in results of attention, along which those of several sequences are put after one another.
constexpr int TOKENS_AXIS = 2;

constexpr size_t MASK = NEURON_SOFT_MAX_MASK;

const neuron_key_ops & ops() {
    return neuron_key_ops::get();
}

// Axes that have the same extents as the first one of them.
struct common_axis {
    tensor_pair tensor;
    int         axis = -1;

    bool is_longer() const { return tensor.group && tensor.is_longer(axis); }

    bool has(const tensor_pair & other, int its) {
        if (!tensor.group) {
            tensor = other;
            axis   = its;
        }
        return other.has_same_extents(its, tensor, axis);
    }
};

class fitting {
  public:
    // any_rows  whether the group is to be any rows of the kernel, one after the other, and not only its first
    fitting(const neuron_key & group, const neuron_key & kernel, bool any_rows) :
        group(group), kernel(kernel), any_rows(any_rows) {}

    bool run(neuron_group_fit & fit) {
        if (!read()) {
            return false;
        }
        find_matrices();
        if (!find_blocks() || !find_rooms()) {
            return false;
        }
        for (size_t i = 0; i < nodes.size(); i++) {
            if (!follow(i) || (any_rows && !is_row_by_row(nodes[i]))) {
                return false;
            }
        }
        fit = {};
        for (const slot & s : slots) {
            fit.slots.push_back(s.room);
        }
        return find_results(fit);
    }

  private:
    // Returns whether the kernel has all that the group has.
    bool read() {
        slots.resize(group.n_slots());
        for (size_t i = 0; i < slots.size(); i++) {
            slots[i].size      = group.slot_size(i);
            slots[i].room.size = kernel.slot_size(i);
        }
        nodes.reserve(group.nodes.size());
        for (size_t i = 0; i < group.nodes.size(); i++) {
            const neuron_key_node & a = group.nodes[i];
            const neuron_key_node & b = kernel.nodes[i];
            node                    n{
                a, { a.tensor, b.tensor },
                 {},
                 {}
            };
            n.inputs.reserve(a.inputs.size());
            for (size_t source = 0; source < a.inputs.size(); source++) {
                const neuron_key_input & in  = a.inputs[source];
                const neuron_key_input & its = b.inputs[source];
                n.inputs.push_back({
                    in.tensor != nullptr, in.to, in.offset, its.offset, { in.tensor, its.tensor },
                          {}
                });
                if (in.tensor && !n.inputs.back().tensor.fits()) {
                    return false;
                }
            }
            if (!n.tensor.fits()) {
                return false;
            }
            nodes.push_back(std::move(n));
        }
        return true;
    }

    //
    // blocks
    //

    // Finds the tokens of a sequence where several have a node of attention each, which CONCAT puts after one another. Returns false where
    // they have different numbers of tokens, or where something else has rows that are not known to be in such blocks.
    bool find_blocks() {
        for (const node & n : nodes) {
            if (n.key.op == ops().concat && n.tensor.is_longer(TOKENS_AXIS)) {
                n_blocks++;
            }
        }
        if (!n_blocks) {
            return true;
        }
        n_blocks = 0;
        for (const node & n : nodes) {
            if (n.key.op == ops().flash_attn_ext) {
                const std::pair<int64_t, int64_t> here = { n.tensor.ne(TOKENS_AXIS), n.tensor.more(TOKENS_AXIS) };
                block                                  = block.first ? block : here;
                if (here != block) {
                    return false;
                }
            }
        }
        for (const node & n : nodes) {
            if (n.key.op == ops().concat && block.first && n.tensor.ne(TOKENS_AXIS) % block.first == 0) {
                n_blocks = std::max(n_blocks, n.tensor.ne(TOKENS_AXIS) / block.first);
            }
        }
        return !any_rows && n_blocks > 1 && block.first < block.second &&
               std::none_of(nodes.begin(), nodes.end(), [](const node & n) { return n.is_matrix(); });
    }

    // Returns how many blocks an axis is that the kernel has more of: extents alone say so. 1: its own elements are the first ones.
    int64_t blocks_of(int64_t ne, int64_t more) const {
        const int64_t n = n_blocks && ne % block.first == 0 ? ne / block.first : 1;
        return n > 1 && n <= n_blocks && more == n * block.second ? n : 1;
    }

    int64_t blocks_of(const tensor_pair & t, int axis) const { return blocks_of(t.ne(axis), t.more(axis)); }

    // Returns the blocks of a tensor along an axis, in bytes.
    neuron_blocks bytes_of_blocks(const tensor_pair & t, int axis) const {
        const int64_t n = blocks_of(t, axis);
        return n > 1 ? neuron_blocks{ n, t.nb(axis) * (size_t) block.first, t.nb(axis) * (size_t) block.second }
                     : neuron_blocks{};
    }

    // Returns whether a view of a node is one of its blocks, alone or with others behind each other, as its axes are or as a matrix.
    bool refer_to_block(const node & of, input & in) const {
        const int axis = of.tensor.outermost();
        if (!n_blocks || axis < 0 || blocks_of(of.tensor, axis) < 2 || of.has[axis] != REPEATED) {
            return false;
        }
        const uint64_t own = of.tensor.nb(axis) * (uint64_t) block.first;
        const uint64_t its = of.tensor.nb(axis) * (uint64_t) block.second;
        if (in.offset % own != 0 || in.offset / own >= (uint64_t) blocks_of(of.tensor, axis) ||
            in.kernel_offset != in.offset / own * its || !in.tensor.is_in_place()) {
            return false;
        }
        beyonds has{};
        int     n_longer = 0;
        for (int j = 0; j < N_DIMS; j++) {
            // all else is within a token, of which the view has all bytes or some
            if (in.tensor.is_longer(j)) {
                n_longer++;
                has[j] = REPEATED;
                if (in.tensor.ne(j) != block.first || in.tensor.more(j) != block.second ||
                    in.tensor.nb(j) != of.tensor.nb(axis)) {
                    return false;
                }
            } else if (in.tensor.ne(j) > 1 && (uint64_t) in.tensor.ne(j) * in.tensor.nb(j) > of.tensor.nb(axis)) {
                return false;
            }
        }
        in.has = has;
        return n_longer == 1;
    }

    // Blocks, and one behind them.
    bool follow_concat(node & n) const {
        constexpr int axis = TOKENS_AXIS;
        if (!n_blocks || n.key.op != ops().concat || (int32_t) n.key.params[0] != axis || n.inputs.size() != 2 ||
            n.tensor.is_longer_beside(axis) || n.tensor.ne(axis) % block.first != 0 ||
            n.tensor.more(axis) != n.tensor.ne(axis) / block.first * block.second) {
            return false;
        }
        for (size_t i = 0; i < n.inputs.size(); i++) {
            const input & in    = n.inputs[i];
            const int64_t count = i ? 1 : n.tensor.ne(axis) / block.first - 1;
            if (!in.is_there || in.tensor.is_longer_beside(axis) || in.tensor.ne(axis) != count * block.first ||
                in.tensor.more(axis) != count * block.second || in.has[axis] != REPEATED) {
                return false;
            }
        }
        n.has[axis] = REPEATED;
        return true;
    }

    // Returns whether numbers of rows of blocks are those of a slot, which are made for the kernel.
    bool names_blocks(const node & n, size_t source) const {
        return n_blocks && n.key.op == ops().get_rows && source == LOOKED_UP &&
               blocks_of(n.inputs.front().tensor, ROWS_AXIS) > 1;
    }

    //
    // slots
    //

    // Finds nodes that look up rows which others read as a matrix of them: those for each pair of tokens, as T5's bias has.
    void find_matrices() {
        for (const node & reader : nodes) {
            for (const input & in : reader.inputs) {
                if (in.is_in_node() && nodes[in.to.index].key.op == ops().get_rows) {
                    set_matrix(nodes[in.to.index], in.tensor);
                }
            }
        }
    }

    // Sets the columns of a node's rows where a view of them has more columns and more rows of a matrix in the kernel.
    static void set_matrix(node & of, const tensor_pair & view) {
        for (int column = 0; column < N_DIMS; column++) {
            for (int row = 0; row < N_DIMS; row++) {
                if (column != row && is_matrix_of(of.tensor, view, column, row)) {
                    of.columns = { view.ne(column), view.more(column) };
                }
            }
        }
    }

    // Returns whether axes of a view are the columns and rows of a matrix of a tensor's rows.
    static bool is_matrix_of(const tensor_pair & of, const tensor_pair & view, int column, int row) {
        const uint64_t size = of.nb(ROWS_AXIS);
        const auto     has  = [&](int axis, uint64_t group, uint64_t kernel) {
            return view.nb(axis) == kernel && (view.ne(axis) == 1 || view.group[5 + axis] == group);
        };
        return view.is_longer(column) && view.is_longer(row) && !of.is_longer_beside(ROWS_AXIS) &&
               view.ne(column) * view.ne(row) == of.ne(ROWS_AXIS) &&
               view.more(column) * view.more(row) == of.more(ROWS_AXIS) && has(column, size, size) &&
               has(row, size * (uint64_t) view.ne(column), size * (uint64_t) view.more(column));
    }

    // Returns what a slot has to have for a source of a node that the kernel has more of.
    neuron_group_room::kind_t kind_for(const node & n, size_t source) const {
        const input &       in    = n.inputs[source];
        const tensor_pair & t     = in.tensor;
        const auto          rules = neuron_token_rules(n.key.op);
        if ((n.key.op == ops().soft_max && source == MASK && t.is_longer(0)) ||
            (n.key.op == ops().mul_mat && source == 1 && t.is_longer(SUMMED)) ||
            (n.is_matrix() && source == LOOKED_UP)) {
            return neuron_group_room::WIDER;
        }
        const bool written = n.key.op == ops().set_rows && source == NEURON_SET_ROWS_INTO;
        const bool copied  = ops().copies(n.key.op) && slots[in.to.index].is_written;
        if (written || copied || (n.key.op == ops().mul_mat && source == 0)) {
            return neuron_group_room::CELLS;
        }
        for (const neuron_token_rule * rule = rules.first; rule != rules.second; rule++) {
            const int more = source < NEURON_TOKEN_SOURCES ? rule->more[source] : -1;
            if (rule->mask >= 0 && more >= 0 && t.is_longer(more)) {
                return (int) source == rule->mask ? neuron_group_room::WIDER : neuron_group_room::CELLS;
            }
        }
        return neuron_group_room::ROWS;
    }

    // Notes what a source of a node needs of its slot. Returns false when no slot has it.
    bool use_slot(size_t i, size_t source) {
        const input &       in    = nodes[i].inputs[source];
        slot &              s     = slots[in.to.index];
        const neuron_blocks named = names_blocks(nodes[i], source)
                                        ? neuron_blocks{ n_blocks, (size_t) block.first, (size_t) block.second }
                                        : neuron_blocks{};
        if (s.is_used && !(s.room.named == named)) {
            return false;
        }
        s.is_used    = true;
        s.room.named = named;
        if (named.n > 1 && (in.offset || in.kernel_offset || in.tensor.group[5] != in.tensor.nb(0) ||
                            in.tensor.nb(0) != (uint64_t) nk::find_type((int64_t) in.tensor.group[0])->size)) {
            return false;
        }
        if (!in.tensor.is_longer()) {
            s.is_fixed = true;
            return true;
        }
        neuron_group_room room = s.room;
        room.kind              = kind_for(nodes[i], source);
        size_t added           = 0;
        if (room.kind == neuron_group_room::ROWS) {
            const int axis = in.tensor.outermost();
            if (axis < 0 || (axis == 0 && nk::find_type((int64_t) in.tensor.group[0])->block != 1)) {
                return false;
            }
            room.period = in.tensor.nb(axis) * (size_t) in.tensor.ne(axis);
            room.blocks = bytes_of_blocks(in.tensor, axis);
            added       = in.tensor.nb(axis) * (size_t) (in.tensor.more(axis) - in.tensor.ne(axis));
        } else if (room.kind == neuron_group_room::WIDER) {
            const node & n = nodes[i];
            if (any_rows && n.key.op != ops().soft_max && n.key.op != ops().flash_attn_ext) {
                return false;
            }
            room.node   = i;
            room.source = source;
            if (n.is_matrix()) {
                const int64_t columns = n.columns.second;
                room.wider            = { columns, in.tensor.more(0) / columns, neuron_fill::REPEAT, n.columns.first };
            } else {
                const bool weighs = n.key.op == ops().mul_mat;
                room.wider = { in.tensor.more(0), in.tensor.more(1), weighs ? neuron_fill::ZERO : neuron_fill::HIDE };
            }
            if (!is_plain(in)) {
                return false;
            }
        }
        const bool first = s.room.kind == neuron_group_room::NONE;
        const bool same  = room.kind == s.room.kind && room.period == s.room.period && added == s.added &&
                           room.wider == s.room.wider && room.blocks == s.room.blocks;
        if (first) {
            s.room  = room;
            s.added = added;
        }
        return first || same;
    }

    // Returns whether a source is a matrix as neuron_widen takes and makes it.
    static bool is_plain(const input & in) {
        const tensor_pair & t    = in.tensor;
        const auto *        type = nk::find_type((int64_t) t.group[0]);
        return in.offset == 0 && in.kernel_offset == 0 && type->block == 1 && t.group[5] == type->size &&
               t.nb(0) == type->size && t.more(2) == 1 && t.more(3) == 1 &&
               (t.more(1) == 1 || t.nb(1) == type->size * (uint64_t) t.more(0));
    }

    bool find_rooms() {
        for (const node & n : nodes) {
            if (n.key.is_in_slot()) {
                slots[n.key.to.index].is_written = true;
            }
        }
        for (size_t i = 0; i < nodes.size(); i++) {
            for (size_t source = 0; source < nodes[i].inputs.size(); source++) {
                const input & in = nodes[i].inputs[source];
                if (in.is_there && in.to.is_slot && !use_slot(i, source)) {
                    return false;
                }
            }
            if (nodes[i].key.is_in_slot() && !is_sum_in_place(nodes[i])) {
                slots[nodes[i].key.to.index].is_fixed = true;
            }
        }
        return std::all_of(slots.begin(), slots.end(), [](const slot & s) {
            switch (s.room.kind) {
                case neuron_group_room::NONE:
                    return s.room.size == s.size;
                case neuron_group_room::CELLS:
                    return s.room.size >= s.size;
                case neuron_group_room::ROWS:  // which do not lie among each other
                    return !s.is_fixed && s.room.size == s.size + s.added && s.size <= s.room.period;
                case neuron_group_room::WIDER:
                    return !s.is_fixed;
            }
            return false;
        });
    }

    //
    // following the nodes
    //

    // Finds out what is beyond a source's elements; returns false when these are not where the kernel has them.
    bool refer(size_t i, input & in) const {
        if (!in.is_there) {
            return true;
        }
        if (!in.to.is_slot) {
            return refer_to_node(nodes[in.to.index], in);
        }
        const neuron_group_room & room = slots[in.to.index].room;
        if (room.kind == neuron_group_room::WIDER) {
            in.has[0] = in.tensor.is_longer(0) ? beyond_of(room.wider.fill) : NOTHING;
            in.has[1] = in.tensor.is_longer(1) ? REPEATED : NOTHING;
            return true;
        }
        for (int axis = 0; axis < N_DIMS; axis++) {
            if (in.tensor.is_longer(axis)) {
                in.has[axis] = room.kind == neuron_group_room::ROWS ? REPEATED : CELLS;
            }
        }
        return in.offset == in.kernel_offset && in.tensor.is_in_place();
    }

    static beyond beyond_of(neuron_fill fill) {
        return fill == neuron_fill::HIDE ? MASKED : fill == neuron_fill::ZERO ? ZERO : REPEATED;
    }

    // The memory of a node is dense. A view of it has the node's axes in some order, or is at the same bytes.
    bool refer_to_node(const node & of, input & in) const {
        if (of.is_matrix()) {
            return refer_to_matrix(of, in);
        }
        if (is_permuted(of, in) || refer_to_block(of, in)) {
            return true;
        }
        const int axis = of.tensor.outermost();
        if ((of.tensor.is_longer() && axis < 0) || !of.tensor.is_in_place() ||
            (n_blocks && of.tensor.is_longer() && !in.tensor.is_longer())) {
            return false;
        }
        for (int j = 0; j < N_DIMS; j++) {
            if (in.tensor.is_longer(j)) {
                const bool rows = axis >= 0 && (uint64_t) in.tensor.ne(j) * in.tensor.nb(j) ==
                                                   (uint64_t) of.tensor.ne(axis) * of.tensor.nb(axis);
                in.has[j]       = rows ? of.has[axis] : ANYTHING;
                if (n_blocks && !(rows && in.tensor.has_same_extents(j, of.tensor, axis))) {
                    return false;
                }
            }
        }
        return in.offset == in.kernel_offset && in.tensor.is_in_place();
    }

    // Elements of a row of the group are at the beginning of the kernel's, behind which others of it come again.
    static bool refer_to_matrix(const node & of, input & in) {
        for (int column = 0; column < N_DIMS; column++) {
            for (int row = 0; row < N_DIMS; row++) {
                if (column == row || in.tensor.ne(column) != of.columns.first ||
                    !is_matrix_of(of.tensor, in.tensor, column, row) || in.tensor.is_longer_beside(column, row)) {
                    continue;
                }
                in.has[(size_t) column] = of.has[ROWS_AXIS];
                in.has[(size_t) row]    = of.has[ROWS_AXIS];
                return in.offset == 0 && in.kernel_offset == 0;
            }
        }
        return false;
    }

    static bool is_permuted(const node & of, input & in) {
        beyonds has{};
        int     n_axes = 0;
        for (int j = 0; j < N_DIMS; j++) {
            if (in.tensor.more(j) == 1) {
                continue;
            }
            int axis = 0;
            while (axis < N_DIMS && (of.tensor.more(axis) == 1 || of.tensor.nb(axis) != in.tensor.nb(j))) {
                axis++;
            }
            if (axis == N_DIMS || !in.tensor.has_same_extents(j, of.tensor, axis) ||
                (in.tensor.ne(j) != 1 && in.tensor.group[5 + j] != of.tensor.group[5 + axis])) {
                return false;
            }
            has[j] = of.has[axis];
            n_axes++;
        }
        for (int axis = 0; axis < N_DIMS; axis++) {
            n_axes -= of.tensor.more(axis) != 1;
        }
        if (n_axes != 0 || in.offset != 0 || in.kernel_offset != 0) {
            return false;
        }
        in.has = has;
        return true;
    }

    // Follows a node; returns false when its elements depend on what is beyond those of its sources.
    bool follow(size_t i) {
        node & n = nodes[i];
        for (input & in : n.inputs) {
            if (in.is_there && !in.to.is_slot && in.to.index == i) {
                in.is_there = false;  // ggml_cast names its own result
            }
            if (!refer(i, in)) {
                return false;
            }
        }
        if (n.tensor.is_longer() || n.has_longer_inputs()) {
            const auto rules = neuron_token_rules(n.key.op);
            if (std::none_of(rules.first, rules.second,
                             [&](const neuron_token_rule & rule) {
                                 n.has = {};
                                 return rule.result == neuron_token_rule::OUTERMOST ? follow_rows(n, rule)
                                                                                    : follow_named(n, rule);
                             }) &&
                !follow_concat(n) && ((n_blocks && !ops().copies(n.key.op)) || !follow_scores(n))) {
                return false;
            }
        }
        return n.key.is_own || writes_in_place(n);
    }

    // Returns whether a copy has its source's elements where it has them in the group, whatever the shapes.
    static bool is_copied(const tensor_pair & from, const tensor_pair & to, int axis) {
        return from.has_same_extents(to) || (from.outermost() == axis && to.outermost() == axis);
    }

    // Attention without flash attention, of which the scores have an axis of cells: what is beyond that is finite, becomes 0 by
    // the mask, and is summed as 0.
    static bool follow_scores(node & n) {
        n.has = {};
        if (ops().copies(n.key.op)) {
            return follow_joined(n);
        }
        if (n.key.op == ops().mul_mat) {
            return follow_product(n);
        }
        if (n.key.op == ops().add) {
            return follow_sum(n);
        }
        if (n.key.op != ops().soft_max && n.key.op != ops().scale && n.key.op != ops().tanh) {
            return false;
        }
        const input & in = n.inputs[0];
        if (!in.is_there || !in.tensor.has_same_extents(n.tensor)) {
            return false;
        }
        n.has = in.has;
        return n.key.op == ops().soft_max ? follow_soft_max(n) : n.has[0] == CELLS;
    }

    // A copy of several axes as one: rows that follow each other in both.
    static bool follow_joined(node & n) {
        const input & in   = n.inputs[0];
        const int     from = in.tensor.outermost();
        const int     to   = n.tensor.outermost();
        if (from < 0 || to < 0) {
            return false;
        }
        const auto row = [](const tensor_pair & t, int axis) {
            int64_t n = 1;
            for (int i = 0; i < axis; i++) {
                n *= t.ne(i);
            }
            return n;
        };
        n.has[(size_t) to] = in.has[(size_t) from];
        return row(in.tensor, from) == row(n.tensor, to) && in.tensor.has_same_extents(from, n.tensor, to) &&
               std::none_of(n.inputs.begin() + 1, n.inputs.end(), [](const input & other) {
                   return other.is_there;  // what CPY writes to
               });
    }

    // Rows of a matrix with those of another one, head by head.
    static bool follow_product(node & n) {
        const tensor_pair & a = n.inputs[0].tensor;
        const tensor_pair & b = n.inputs[1].tensor;
        for (const tensor_pair * t : { &a, &b, static_cast<const tensor_pair *>(&n.tensor) }) {
            if (t->is_longer_beside(0, 1)) {
                return false;
            }
        }
        if (!a.has_same_extents(SUMMED, b, SUMMED) || !a.has_same_extents(1, n.tensor, 0) ||
            !b.has_same_extents(1, n.tensor, 1)) {
            return false;
        }
        if (a.is_longer(SUMMED) && (!is_finite(n.inputs[0].has[SUMMED]) || n.inputs[1].has[SUMMED] != ZERO)) {
            return false;
        }
        n.has[0] = is_finite(n.inputs[0].has[1]) ? CELLS : n.inputs[0].has[1];
        n.has[1] = n.inputs[1].has[1];
        return (!n.tensor.is_longer(0) || n.has[0] == CELLS) && (!n.tensor.is_longer(1) || n.has[1] == REPEATED);
    }

    // Returns whether all that is beyond is finite, so that weight 0 makes it 0.
    static bool is_finite(beyond has) { return has == CELLS || has == REPEATED; }

    // Scores and a bias of each.
    static bool follow_sum(node & n) {
        for (const input & in : n.inputs) {
            if (!in.is_there || !in.tensor.has_same_extents(n.tensor) || !is_finite(in.has[0]) ||
                (in.tensor.is_longer(1) && in.has[1] != REPEATED)) {
                return false;
            }
        }
        n.has[0] = CELLS;
        n.has[1] = n.tensor.is_longer(1) ? REPEATED : NOTHING;
        return n.tensor.is_longer(0) && !n.tensor.is_longer_beside(0, 1);
    }

    // The cells of each row together, of which the mask hides those that the group does not have.
    static bool follow_soft_max(node & n) {
        const bool masked = n.inputs.size() > MASK && n.inputs[MASK].is_there;
        if (!masked || !n.tensor.is_longer(0) || n.has[0] != CELLS || n.tensor.is_longer_beside(0, 1)) {
            return false;
        }
        const input & mask = n.inputs[MASK];
        for (int axis = 0; axis < 2; axis++) {
            if (!mask.tensor.has_same_extents(axis, n.tensor, axis)) {
                return false;
            }
        }
        n.has[0] = ZERO;
        return mask.has[0] == MASKED && (!n.tensor.is_longer(1) || (n.has[1] == REPEATED && mask.has[1] == REPEATED)) &&
               std::none_of(n.inputs.begin() + MASK + 1, n.inputs.end(),
                            [](const input & sinks) { return sinks.is_longer(); });
    }

    // Ops that compute rows, each from those of the sources at the same place.
    static bool follow_rows(node & n, const neuron_token_rule & rule) {
        const bool copy = ops().copies(n.key.op);
        for (int axis = 0; axis < N_DIMS; axis++) {
            const bool longer = n.tensor.is_longer(axis);
            if (longer && axis == 0 && !copy) {
                return false;
            }
            n.has[axis] = longer ? REPEATED : NOTHING;
            for (const input & in : n.inputs) {
                if (!in.is_there || (!longer && !in.tensor.is_longer(axis))) {
                    continue;
                }
                if (!in.tensor.is_longer(axis)) {
                    if (!rule.broadcast || in.tensor.more(axis) != 1) {
                        return false;
                    }
                    continue;
                }
                if (!in.tensor.has_same_extents(axis, n.tensor, axis) ||
                    (copy && !is_copied(in.tensor, n.tensor, axis))) {
                    return false;
                }
                if (in.has[axis] != REPEATED) {
                    n.has[axis] = copy ? in.has[axis] : ANYTHING;
                }
            }
        }
        return true;
    }

    // Ops of which the rule names the axes.
    bool follow_named(node & n, const neuron_token_rule & rule) const {
        const bool writes = n.key.op == ops().set_rows;  // the result is a source
        if (n.tensor.is_longer_beside(writes ? NEURON_SET_ROWS_AXIS : rule.result)) {
            return false;
        }
        common_axis tokens;
        common_axis cells;
        bool        masked = false;
        if (rule.result >= 0) {
            tokens = { n.tensor, rule.result };
        }
        for (size_t i = 0; i < n.inputs.size(); i++) {
            const input & in   = n.inputs[i];
            const bool    has  = i < NEURON_TOKEN_SOURCES;
            const int     axis = has ? rule.sources[i] : -1;
            const int     more = has ? rule.more[i] : -1;
            if (!in.is_there) {
                continue;
            }
            if (in.tensor.is_longer_beside(axis, more) || (axis >= 0 && !follow_tokens(in, axis, tokens))) {
                return false;
            }
            if (any_rows && more >= 0 && in.tensor.is_longer(more)) {
                return false;  // each row sees all of these
            }
            if (more < 0 || rule.mask < 0) {
                continue;
            }
            if (!cells.has(in.tensor, more)) {
                return false;
            }
            if ((int) i == rule.mask) {
                masked = in.has[more] == MASKED;
            } else if (in.tensor.is_longer(more) && in.has[more] != CELLS && in.has[more] != REPEATED) {
                return false;
            }
        }
        if (n.tensor.is_longer() && !writes) {
            n.has[(size_t) rule.result] = REPEATED;
        }
        return masked || !cells.is_longer();
    }

    // Returns whether a source has the tokens of the others, and what is beyond them as well.
    static bool follow_tokens(const input & in, int axis, common_axis & tokens) {
        const bool same = tokens.has(in.tensor, axis);
        return (!in.tensor.is_longer(axis) && !tokens.is_longer()) || (same && in.has[axis] == REPEATED);
    }

    // Returns whether a node is a sum over devices of rows that a slot has, in their place. Copies of rows sum up to copies of the sum, for
    // all devices have the same rows again.
    static bool is_sum_in_place(const node & n) {
        const input & in = n.inputs.front();
        return n.key.op == ops().all_reduce && in.is_there && in.to == n.key.to && in.offset == n.key.offset &&
               in.tensor.has_same_extents(n.tensor);
    }

    // Nothing is written but where the group writes: memory that others see has the same elements, and that of a node has what
    // belongs there. SET_ROWS leaves cells as they are whose numbers it is not given.
    bool writes_in_place(const node & n) const {
        input into{ true, n.key.to, n.key.offset, n.key.offset, n.tensor, {} };
        if (into.to.is_slot) {
            if (is_sum_in_place(n) && slots[into.to.index].room.kind == neuron_group_room::ROWS) {
                return true;  // the kernel has copies of the rows, and the group's own go back
            }
            const int axis = n.key.op == ops().set_rows ? NEURON_SET_ROWS_AXIS : -1;
            return !n.tensor.is_longer_beside(axis) && n.tensor.is_in_place();
        }
        return refer_to_node(nodes[into.to.index], into) && into.has == n.has;
    }

    // Returns whether what a node computes of rows depends only on the same rows of all that have rows: first rows would also come
    // out of the first rows of something whole, which others have to come out of others of. Memory is written row by row or not at
    // all: several launches would change it several times.
    bool is_row_by_row(const node & n) const {
        if (n.key.is_in_slot() ? n.key.op != ops().set_rows || !has_rows(n, 0) || !has_rows(n, 1)
                               : !n.tensor.is_longer() && n.has_longer_inputs()) {
            return false;
        }
        return std::all_of(n.inputs.begin(), n.inputs.end(), [this](const input & in) {
            if (!in.is_there) {
                return true;
            }
            const bool whole = in.to.is_slot ? slots[in.to.index].room.kind == neuron_group_room::NONE
                                             : !nodes[in.to.index].tensor.is_longer();
            for (int axis = 0; axis < N_DIMS; axis++) {
                if (in.tensor.is_longer(axis) && in.has[axis] != REPEATED) {
                    return false;
                }
            }
            return in.tensor.is_longer() != whole;
        });
    }

    static bool has_rows(const node & n, size_t source) {
        return source < n.inputs.size() && n.inputs[source].is_longer();
    }

    bool find_results(neuron_group_fit & fit) const {
        for (const node & n : nodes) {
            if (!n.key.escapes) {
                continue;
            }
            const int along = n.tensor.outermost();
            if (n.tensor.is_longer() && along < 0) {
                return false;
            }
            neuron_group_room room;
            room.kind   = n.tensor.is_longer() ? neuron_group_room::ROWS : neuron_group_room::NONE;
            room.size   = neuron_nbytes_of_words(n.tensor.kernel);
            room.period = along < 0 ? 0 : n.tensor.nb(along) * (size_t) n.tensor.ne(along);
            room.blocks = along < 0 ? neuron_blocks{} : bytes_of_blocks(n.tensor, along);
            fit.results.push_back(room);
        }
        const int axis = nodes.front().tensor.outermost();
        fit.padding    = axis < 0 ? 0 : nodes.front().tensor.more(axis) - nodes.front().tensor.ne(axis);
        return true;
    }

    const neuron_key & group;
    const neuron_key & kernel;
    const bool         any_rows;
    std::vector<node>  nodes;
    std::vector<slot>  slots;

    int64_t                     n_blocks = 0;  // 0: rows are in none
    std::pair<int64_t, int64_t> block{};       // rows of one, of the group and of the kernel
};

}  // namespace

bool neuron_fit_whole(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit) {
    return fitting(group, kernel, false).run(fit);
}

bool neuron_fit_rows(const neuron_key & rows, const neuron_key & group, neuron_group_fit & fit) {
    return fitting(rows, group, true).run(fit);
}
