#include "select/group_fit_views.h"

#include "select/group_fit_slots.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace neuron_fit {

// Each row of the group begins where the kernel's row begins. Behind it, the row's elements repeat.
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

// Sets the values beyond a view whose axes are a node's axes in some order. Returns false for another view.
static bool refer_permuted(const node & of, input & in) {
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

bool refer_to_node(const node & of, const sequence_blocks & blocks, input & in) {
    if (of.is_matrix()) {
        return refer_to_matrix(of, in);
    }
    if (refer_permuted(of, in) || blocks.refer(of, in)) {
        return true;
    }
    const int axis = of.tensor.outermost();
    if ((of.tensor.is_longer() && axis < 0) || !of.tensor.is_in_place() ||
        (blocks && of.tensor.is_longer() && !in.tensor.is_longer())) {
        return false;
    }
    for (int j = 0; j < N_DIMS; j++) {
        if (in.tensor.is_longer(j)) {
            const bool rows = axis >= 0 && (uint64_t) in.tensor.ne(j) * in.tensor.nb(j) ==
                                               (uint64_t) of.tensor.ne(axis) * of.tensor.nb(axis);
            in.has[j]       = rows ? of.has[axis] : ANYTHING;
            if (blocks && !(rows && in.tensor.has_same_extents(j, of.tensor, axis))) {
                return false;
            }
        }
    }
    return in.offset == in.kernel_offset && in.tensor.is_in_place();
}

static beyond beyond_of(neuron_fill fill) {
    return fill == neuron_fill::HIDE ? MASKED : fill == neuron_fill::ZERO ? ZERO : REPEATED;
}

bool refer(const std::vector<node> & nodes,
           const std::vector<slot> & slots,
           const sequence_blocks &   blocks,
           input &                   in) {
    if (!in.is_there) {
        return true;
    }
    if (!in.to.is_slot) {
        return refer_to_node(nodes[in.to.index], blocks, in);
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

}  // namespace neuron_fit
