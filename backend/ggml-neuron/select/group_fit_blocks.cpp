#include "select/group_fit_blocks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace neuron_fit {

// Returns the axis along which a node joins results of attention: tokens, or rows of all heads. -1: another node.
static int joined_axis(const std::vector<node> & nodes, const node & n) {
    if (n.key.op != ops().concat || n.inputs.size() != 2 || !n.inputs[1].is_in_node()) {
        return -1;
    }
    const uint64_t attends = nodes[n.inputs[1].to.index].key.op;
    const int      axis    = attends == ops().flash_attn_ext ? TOKENS_AXIS : attends == ops().cont ? ROWS_AXIS : -1;
    return (int32_t) n.key.params[0] == axis ? axis : -1;
}

// Sets the tokens per sequence, and the number of sequences. Returns false when the numbers of tokens differ.
bool sequence_blocks::find_tokens(const std::vector<node> & nodes) {
    for (const node & n : nodes) {
        const int axis = joined_axis(nodes, n);
        if (axis < 0 || !n.tensor.is_longer(axis)) {
            continue;
        }
        const tensor_pair &               last = n.inputs[1].tensor;
        const std::pair<int64_t, int64_t> here = { last.ne(axis), last.more(axis) };
        block                                  = block.first ? block : here;
        if (here != block) {
            return false;
        }
        n_blocks       = std::max(n_blocks, n.tensor.ne(axis) / block.first);
        joined[&n.key] = axis;
    }
    return true;
}

bool sequence_blocks::find(const std::vector<node> & nodes, bool any_rows) {
    if (!find_tokens(nodes)) {
        return false;
    }
    if (!n_blocks) {
        return true;
    }
    // the row numbers for a sequence's elements must be in one block
    const bool mixed = std::any_of(nodes.begin(), nodes.end(), [this](const node & n) {
        return n.key.op == ops().set_rows && n.inputs[LOOKED_UP].is_there && of(n.inputs[LOOKED_UP].tensor, 0) > 1;
    });
    return !any_rows && !mixed && n_blocks > 1 && block.first < block.second &&
           std::none_of(nodes.begin(), nodes.end(), [](const node & n) { return n.is_matrix(); });
}

int64_t sequence_blocks::of(int64_t ne, int64_t more) const {
    const int64_t n = n_blocks && ne % block.first == 0 ? ne / block.first : 1;
    return n > 1 && n <= n_blocks && more == n * block.second ? n : 1;
}

neuron_blocks sequence_blocks::bytes_of(const tensor_pair & t, int axis) const {
    const int64_t n = of(t, axis);
    return n > 1 ? neuron_blocks{ n, t.nb(axis) * (size_t) block.first, t.nb(axis) * (size_t) block.second }
                 : neuron_blocks{};
}

bool sequence_blocks::refer(const node & whole, input & in) const {
    const int axis = whole.tensor.outermost();
    if (!n_blocks || axis < 0 || of(whole.tensor, axis) < 2 || whole.has[axis] != REPEATED) {
        return false;
    }
    const uint64_t own = whole.tensor.nb(axis) * (uint64_t) block.first;
    const uint64_t its = whole.tensor.nb(axis) * (uint64_t) block.second;
    if (in.offset % own != 0 || in.offset / own >= (uint64_t) of(whole.tensor, axis) ||
        in.kernel_offset != in.offset / own * its || !in.tensor.is_in_place()) {
        return false;
    }
    beyonds has{};
    int     n_longer = 0;
    for (int j = 0; j < N_DIMS; j++) {
        // the other axes are within a token, and the view has all or some of its bytes
        if (in.tensor.is_longer(j)) {
            n_longer++;
            has[j]          = REPEATED;
            // tokens, or the elements of their rows one by one
            const int64_t n = in.tensor.ne(j) / block.first;
            if (in.tensor.ne(j) != n * block.first || in.tensor.more(j) != n * block.second ||
                in.tensor.nb(j) * (uint64_t) n != whole.tensor.nb(axis)) {
                return false;
            }
        } else if (in.tensor.ne(j) > 1 && (uint64_t) in.tensor.ne(j) * in.tensor.nb(j) > whole.tensor.nb(axis)) {
            return false;
        }
    }
    in.has = has;
    return n_longer == 1;
}

bool sequence_blocks::follow_concat(node & n) const {
    const auto found = joined.find(&n.key);
    const int  axis  = found == joined.end() ? -1 : found->second;
    if (axis < 0 || n.tensor.is_longer_beside(axis) || n.tensor.ne(axis) % block.first != 0 ||
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

bool sequence_blocks::has(const node & n) const {
    const auto any = [this](const tensor_pair & t) {
        for (int axis = 0; axis < N_DIMS; axis++) {
            if (of(t, axis) > 1) {
                return true;
            }
        }
        return false;
    };
    return any(n.tensor) || std::any_of(n.inputs.begin(), n.inputs.end(),
                                        [&](const input & in) { return in.is_there && any(in.tensor); });
}

bool sequence_blocks::are_named(const node & n, size_t source) const {
    return n_blocks && n.key.op == ops().get_rows && source == LOOKED_UP && of(n.inputs.front().tensor, ROWS_AXIS) > 1;
}

}  // namespace neuron_fit
