#include "select/group_fit_blocks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace neuron_fit {

static bool is_longer_concat(const node & n) {
    return n.key.op == ops().concat && n.tensor.is_longer(TOKENS_AXIS);
}

// Sets the tokens of a sequence. Returns false where some have other numbers of them.
bool sequence_blocks::find_tokens(const std::vector<node> & nodes) {
    for (const node & n : nodes) {
        if (n.key.op == ops().flash_attn_ext) {
            const std::pair<int64_t, int64_t> here = { n.tensor.ne(TOKENS_AXIS), n.tensor.more(TOKENS_AXIS) };
            block                                  = block.first ? block : here;
            if (here != block) {
                return false;
            }
        }
    }
    return true;
}

bool sequence_blocks::find(const std::vector<node> & nodes, bool any_rows) {
    if (std::none_of(nodes.begin(), nodes.end(), is_longer_concat)) {
        return true;
    }
    if (any_rows || !find_tokens(nodes)) {
        return false;
    }
    for (const node & n : nodes) {
        if (n.key.op == ops().concat && block.first && n.tensor.ne(TOKENS_AXIS) % block.first == 0) {
            n_blocks = std::max(n_blocks, n.tensor.ne(TOKENS_AXIS) / block.first);
        }
    }
    return n_blocks > 1 && block.first < block.second &&
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
        // all else is within a token, of which the view has all bytes or some
        if (in.tensor.is_longer(j)) {
            n_longer++;
            has[j] = REPEATED;
            if (in.tensor.ne(j) != block.first || in.tensor.more(j) != block.second ||
                in.tensor.nb(j) != whole.tensor.nb(axis)) {
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

bool sequence_blocks::are_named(const node & n, size_t source) const {
    return n_blocks && n.key.op == ops().get_rows && source == LOOKED_UP && of(n.inputs.front().tensor, ROWS_AXIS) > 1;
}

}  // namespace neuron_fit
