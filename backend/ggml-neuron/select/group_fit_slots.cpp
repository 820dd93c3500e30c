#include "select/group_fit_slots.h"

#include "../../bundle/src/key.h"
#include "select/tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace neuron_fit {

// Sets the columns of a node's rows if a view reads them as a matrix that has more columns and more rows in the kernel.
static void set_matrix(node & of, const tensor_pair & view) {
    for (int column = 0; column < N_DIMS; column++) {
        for (int row = 0; row < N_DIMS; row++) {
            if (column != row && is_matrix_of(of.tensor, view, column, row)) {
                of.columns = { view.ne(column), view.more(column) };
            }
        }
    }
}

void find_matrices(std::vector<node> & nodes) {
    for (const node & reader : nodes) {
        for (const input & in : reader.inputs) {
            if (in.is_in_node() && nodes[in.to.index].key.op == ops().get_rows) {
                set_matrix(nodes[in.to.index], in.tensor);
            }
        }
    }
}

bool is_matrix_of(const tensor_pair & of, const tensor_pair & view, int column, int row) {
    const uint64_t size = of.nb(ROWS_AXIS);
    const auto     has  = [&](int axis, uint64_t group, uint64_t kernel) {
        return view.nb(axis) == kernel && (view.ne(axis) == 1 || view.group[5 + axis] == group);
    };
    return view.is_longer(column) && view.is_longer(row) && !of.is_longer_beside(ROWS_AXIS) &&
           view.ne(column) * view.ne(row) == of.ne(ROWS_AXIS) &&
           view.more(column) * view.more(row) == of.more(ROWS_AXIS) && has(column, size, size) &&
           has(row, size * (uint64_t) view.ne(column), size * (uint64_t) view.more(column));
}

bool is_sum_in_place(const node & n) {
    const input & in = n.inputs.front();
    return n.key.op == ops().all_reduce && in.is_there && in.to == n.key.to && in.offset == n.key.offset &&
           in.tensor.has_same_extents(n.tensor);
}

// Returns whether a source is a matrix that neuron_widen can take and make.
static bool is_plain(const input & in) {
    const tensor_pair & t    = in.tensor;
    const auto *        type = nk::find_type((int64_t) t.group[0]);
    return in.offset == 0 && in.kernel_offset == 0 && type->block == 1 && t.group[5] == type->size &&
           t.nb(0) == type->size && t.more(2) == 1 && t.more(3) == 1 &&
           (t.more(1) == 1 || t.nb(1) == type->size * (uint64_t) t.more(0));
}

// Returns whether a source is a list of row numbers that neuron_renamed_rows can take.
static bool is_list(const input & in) {
    return !in.offset && !in.kernel_offset && in.tensor.group[5] == in.tensor.nb(0) &&
           in.tensor.nb(0) == (uint64_t) nk::find_type((int64_t) in.tensor.group[0])->size;
}

namespace {

class rooms {
  public:
    rooms(const std::vector<node> & nodes, const sequence_blocks & blocks, bool any_rows, std::vector<slot> & slots) :
        nodes(nodes), blocks(blocks), any_rows(any_rows), slots(slots) {}

    bool find() {
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
        return std::all_of(slots.begin(), slots.end(), has_size);
    }

  private:
    // Returns whether the kernel's size of a slot equals its room's.
    static bool has_size(const slot & s) {
        switch (s.room.kind) {
            case neuron_group_room::NONE:
                return s.room.size == s.size;
            case neuron_group_room::CELLS:
                return s.room.size >= s.size;
            case neuron_group_room::ROWS:  // rows that are not interleaved
                return !s.is_fixed && s.room.size == s.size + s.added && s.size <= s.room.period;
            case neuron_group_room::WIDER:
                return !s.is_fixed;
        }
        return false;
    }

    // Adds the requirements of a node's source to its slot. Returns false when no slot meets them.
    bool use_slot(size_t i, size_t source) {
        const input & in = nodes[i].inputs[source];
        slot &        s  = slots[in.to.index];
        if (!name_blocks(nodes[i], source, s)) {
            return false;
        }
        if (!in.tensor.is_longer()) {
            s.is_fixed = true;
            return true;
        }
        neuron_group_room room  = s.room;
        size_t            added = 0;
        room.kind               = kind_for(nodes[i], source);
        if ((room.kind == neuron_group_room::ROWS && !set_rows(in, room, added)) ||
            (room.kind == neuron_group_room::WIDER && !set_wider(i, source, room))) {
            return false;
        }
        if (s.room.kind == neuron_group_room::NONE) {
            s.room  = room;
            s.added = added;
            return true;
        }
        return room.kind == s.room.kind && room.period == s.room.period && added == s.added &&
               room.wider == s.room.wider && room.blocks == s.room.blocks;
    }

    // Sets the blocks that a slot's row numbers refer to. Returns false when another node uses the numbers differently,
    // or when they can't be made for the kernel.
    bool name_blocks(const node & n, size_t source, slot & s) const {
        const neuron_blocks named = blocks.are_named(n, source) ? blocks.all() : neuron_blocks{};
        if (s.is_used && !(s.room.named == named)) {
            return false;
        }
        s.is_used    = true;
        s.room.named = named;
        return named.n <= 1 || is_list(n.inputs[source]);
    }

    // Returns the kind of room that a slot needs for a source that is larger in the kernel.
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

    // Sets the period of the rows, and the bytes from the end of the group's rows to the end of the kernel's.
    bool set_rows(const input & in, neuron_group_room & room, size_t & added) const {
        const int axis = in.tensor.outermost();
        if (axis < 0 || (axis == 0 && nk::find_type((int64_t) in.tensor.group[0])->block != 1)) {
            return false;
        }
        room.period = in.tensor.nb(axis) * (size_t) in.tensor.ne(axis);
        room.blocks = blocks.bytes_of(in.tensor, axis);
        added       = in.tensor.nb(axis) * (size_t) (in.tensor.more(axis) - in.tensor.ne(axis));
        return true;
    }

    // Sets the kernel's matrix for a node's source.
    bool set_wider(size_t i, size_t source, neuron_group_room & room) const {
        const node &  n  = nodes[i];
        const input & in = n.inputs[source];
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
        return is_plain(in);
    }

    const std::vector<node> & nodes;
    const sequence_blocks &   blocks;
    const bool                any_rows;
    std::vector<slot> &       slots;
};

}  // namespace

bool find_rooms(const std::vector<node> & nodes,
                const sequence_blocks &   blocks,
                bool                      any_rows,
                std::vector<slot> &       slots) {
    return rooms(nodes, blocks, any_rows, slots).find();
}

}  // namespace neuron_fit
