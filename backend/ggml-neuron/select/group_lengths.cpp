#include "select/group_lengths.h"

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"
#include "select/group_fit_ops.h"
#include "select/group_fit_slots.h"
#include "select/group_fit_views.h"
#include "select/tokens.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace neuron_fit {
namespace {

class fitting {
  public:
    // any_rows  whether the group may be any consecutive rows of the kernel, and not only its first rows
    fitting(const neuron_key & group, const neuron_key & kernel, bool any_rows) :
        group(group), kernel(kernel), any_rows(any_rows) {}

    bool run(neuron_group_fit & fit) {
        if (!read()) {
            return false;
        }
        find_matrices(nodes);
        if (!blocks.find(nodes, any_rows) || !find_rooms(nodes, blocks, any_rows, slots)) {
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
    // Returns whether the kernel has all of the group's tensors and slots.
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

    // Follows a node. Returns false when its elements depend on elements beyond its sources' elements.
    bool follow(size_t i) {
        node & n = nodes[i];
        for (input & in : n.inputs) {
            if (in.is_there && !in.to.is_slot && in.to.index == i) {
                in.is_there = false;  // ggml_cast makes its result its own source
            }
            if (!refer(nodes, slots, blocks, in)) {
                return false;
            }
        }
        if ((n.tensor.is_longer() || n.has_longer_inputs()) && !follow_op(n, blocks, any_rows)) {
            return false;
        }
        return n.key.is_own || writes_in_place(n);
    }

    // Checks that the kernel writes only where the group writes: shared memory must keep the group's elements, and a
    // node's memory must hold the expected values beyond. SET_ROWS leaves all cells unchanged that its row numbers do
    // not name.
    bool writes_in_place(const node & n) const {
        input into{ true, n.key.to, n.key.offset, n.key.offset, n.tensor, {} };
        if (into.to.is_slot) {
            if (is_sum_in_place(n) && slots[into.to.index].room.kind == neuron_group_room::ROWS) {
                return true;  // the kernel has copies of the rows, and only the group's own are copied back
            }
            const int axis = n.key.op == ops().set_rows ? NEURON_SET_ROWS_AXIS : -1;
            return !n.tensor.is_longer_beside(axis) && n.tensor.is_in_place();
        }
        return refer_to_node(nodes[into.to.index], blocks, into) && into.has == n.has;
    }

    // Returns whether each row of a node's result depends only on the same rows of all sources that have rows.
    // Otherwise the first rows might come from the first rows of a whole tensor, and other rows would require other
    // rows of it. The group must write memory row by row or not at all: several launches would change other memory
    // several times.
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
            room.blocks = along < 0 ? neuron_blocks{} : blocks.bytes_of(n.tensor, along);
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
    sequence_blocks    blocks;
};

}  // namespace
}  // namespace neuron_fit

bool neuron_fit_whole(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit) {
    return neuron_fit::fitting(group, kernel, false).run(fit);
}

bool neuron_fit_rows(const neuron_key & rows, const neuron_key & group, neuron_group_fit & fit) {
    return neuron_fit::fitting(rows, group, true).run(fit);
}
