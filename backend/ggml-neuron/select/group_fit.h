// Compares a group's nodes with the nodes of a kernel for longer groups, for the files group_fit_*.cpp
// (select/group_lengths.h).

#pragma once

#include "../../bundle/src/graph_key.h"
#include "select/group_lengths.h"
#include "select/key_nodes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace neuron_fit {

constexpr int N_DIMS = 4;

// The kernel's elements beyond the group's along an axis of a tensor.
enum beyond : uint8_t {
    NOTHING,   // the extents are equal
    REPEATED,  // the group's elements again, from the first on
    CELLS,     // cells of a cache: finite, and to be masked
    MASKED,    // -inf, in a mask
    ZERO,      // masked values behind a SOFT_MAX
    ANYTHING,
};

using beyonds = std::array<beyond, N_DIMS>;

// A tensor of the group and of the kernel: nk::TENSOR_WORDS each.
struct tensor_pair {
    const uint64_t * group  = nullptr;
    const uint64_t * kernel = nullptr;

    int64_t ne(int axis) const { return (int64_t) group[1 + axis]; }

    int64_t more(int axis) const { return (int64_t) kernel[1 + axis]; }

    uint64_t nb(int axis) const { return kernel[5 + axis]; }

    bool is_longer(int axis) const { return ne(axis) != more(axis); }

    // Returns whether the kernel's tensor is longer along any other axis than these.
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

    // Returns whether an element has the same place in the group's and the kernel's tensor.
    bool is_in_place() const {
        for (int i = 0; i < N_DIMS; i++) {
            if (ne(i) != 1 && group[5 + i] != kernel[5 + i]) {
                return false;
            }
        }
        return true;
    }

    // Returns the only longer axis, if all axes behind it have one element; else -1.
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

    // Returns whether the types are equal and each extent of the kernel is at least the group's.
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
    uint64_t            offset        = 0;  // in the group's key
    uint64_t            kernel_offset = 0;
    tensor_pair         tensor;
    beyonds             has{};

    bool is_longer() const { return is_there && tensor.is_longer(); }

    bool is_in_node() const { return is_there && !to.is_slot; }
};

struct node {
    const neuron_key_node & key;    // the group's node
    tensor_pair             tensor;
    beyonds                 has{};  // what its memory holds beyond the group's elements
    std::vector<input>      inputs;

    // Columns of the matrix that other nodes read the rows as, in the group and in the kernel, if the kernel has more;
    // 0: no matrix.
    std::pair<int64_t, int64_t> columns{};

    bool is_matrix() const { return columns.first > 0; }

    bool has_longer_inputs() const {
        return std::any_of(inputs.begin(), inputs.end(), [](const input & in) { return in.is_longer(); });
    }
};

struct slot {
    neuron_group_room room;
    size_t            size       = 0;      // bytes in the group
    size_t            added      = 0;      // ROWS: bytes from the end of the group's rows to the end of the kernel's
    bool              is_fixed   = false;  // some use allows no more bytes
    bool              is_used    = false;
    bool              is_written = false;
};

// The summed axis of MUL_MAT's sources.
constexpr int SUMMED = 0;

// GET_ROWS: the source with row numbers, and the axis of the result's rows.
constexpr size_t LOOKED_UP = 1;
constexpr int    ROWS_AXIS = 1;

// The axis of tokens in results of attention; CONCAT joins sequences along it.
constexpr int TOKENS_AXIS = 2;

constexpr size_t MASK = NEURON_SOFT_MAX_MASK;

inline const neuron_key_ops & ops() {
    return neuron_key_ops::get();
}

// Axes with equal extents.
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

}  // namespace neuron_fit
