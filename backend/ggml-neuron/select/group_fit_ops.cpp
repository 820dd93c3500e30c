#include "select/group_fit_ops.h"

#include "select/tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace neuron_fit {

//
// attention without flash attention
//

// A copy that merges several axes into one: the rows are contiguous in both.
static bool follow_joined(node & n) {
    const input & in   = n.inputs[0];
    const int     from = in.tensor.outermost();
    const int     to   = n.tensor.outermost();
    if (from < 0 || to < 0) {
        return false;
    }
    const auto row = [](const tensor_pair & t, int axis) {
        int64_t size = 1;
        for (int i = 0; i < axis; i++) {
            size *= t.ne(i);
        }
        return size;
    };
    n.has[(size_t) to] = in.has[(size_t) from];
    return row(in.tensor, from) == row(n.tensor, to) && in.tensor.has_same_extents(from, n.tensor, to) &&
           std::none_of(n.inputs.begin() + 1, n.inputs.end(), [](const input & other) {
               return other.is_there;  // the destination of CPY
           });
}

// Returns whether all values beyond the group's are finite, so that weight 0 gives 0.
static bool is_finite(beyond has) {
    return has == CELLS || has == REPEATED;
}

// Products of the rows of two matrices, head by head.
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

// A sum of scores and a bias for each.
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

// SOFT_MAX over the cells of each row. The mask hides the cells that the group does not have.
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

// Attention without flash attention, whose scores have an axis of cells. Values beyond the group's cells are finite.
// The mask turns their weights into 0, so they add 0 to the sum.
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

//
// rules of ops

// Returns whether a copy keeps the group's elements in place, for any shapes.
static bool is_copied(const tensor_pair & from, const tensor_pair & to, int axis) {
    return from.has_same_extents(to) || (from.outermost() == axis && to.outermost() == axis);
}

// Follows an axis of such an op's result to its sources, whether it is longer in the kernel or not.
static bool follow_rows_along(int axis, node & n, const neuron_token_rule & rule) {
    const bool copy   = ops().copies(n.key.op);
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
        if (!in.tensor.has_same_extents(axis, n.tensor, axis) || (copy && !is_copied(in.tensor, n.tensor, axis))) {
            return false;
        }
        if (in.has[axis] != REPEATED) {
            n.has[axis] = copy ? in.has[axis] : ANYTHING;
        }
    }
    return true;
}

// Ops that compute each row from the sources' rows at the same place.
static bool follow_rows(node & n, const neuron_token_rule & rule) {
    for (int axis = 0; axis < N_DIMS; axis++) {
        if (!follow_rows_along(axis, n, rule)) {
            return false;
        }
    }
    return true;
}

// Returns whether a source has the same tokens as the other sources, also beyond the group's tokens.
static bool follow_tokens(const input & in, int axis, common_axis & tokens) {
    const bool same = tokens.has(in.tensor, axis);
    return (!in.tensor.is_longer(axis) && !tokens.is_longer()) || (same && in.has[axis] == REPEATED);
}

// Returns whether a source has the same cells as the other sources. Sets `masked` if it is a mask that hides the cells
// beyond the group's.
static bool follow_cells(const input & in, int axis, bool is_mask, common_axis & cells, bool & masked) {
    if (!cells.has(in.tensor, axis)) {
        return false;
    }
    if (is_mask) {
        masked = in.has[axis] == MASKED;
        return true;
    }
    return !in.tensor.is_longer(axis) || is_finite(in.has[axis]);
}

// Ops whose rule names the axes.
static bool follow_named(node & n, const neuron_token_rule & rule, bool any_rows) {
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
            return false;  // each row depends on all of these
        }
        if (more >= 0 && rule.mask >= 0 && !follow_cells(in, more, (int) i == rule.mask, cells, masked)) {
            return false;
        }
    }
    if (n.tensor.is_longer() && !writes) {
        n.has[(size_t) rule.result] = REPEATED;
    }
    return masked || !cells.is_longer();
}

bool follow_op(node & n, const sequence_blocks & blocks, bool any_rows) {
    const auto rules = neuron_token_rules(n.key.op);
    const bool ruled = std::any_of(rules.first, rules.second, [&](const neuron_token_rule & rule) {
        n.has = {};
        return rule.result == neuron_token_rule::OUTERMOST ? follow_rows(n, rule) : follow_named(n, rule, any_rows);
    });
    return ruled || blocks.follow_concat(n) || ((!blocks.has(n) || ops().copies(n.key.op)) && follow_scores(n));
}

}  // namespace neuron_fit
