// A group's nodes beside those of a kernel for longer ones, as the files group_fit_*.cpp follow them for select/group_lengths.h.

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

inline const neuron_key_ops & ops() {
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

}  // namespace neuron_fit
