// Blocks of rows: the tokens of each sequence, where each of several sequences has its own node of attention
// (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace neuron_fit {

class sequence_blocks {
  public:
    // Finds the number of tokens per sequence, where several sequences have their own nodes of attention and CONCAT
    // joins the results. Returns false when the numbers differ, or when other tensors have rows that may not be in such
    // blocks.
    bool find(const std::vector<node> & nodes, bool any_rows);

    // Returns whether rows are in blocks.
    explicit operator bool() const { return n_blocks != 0; }

    // Returns the largest number of blocks of an axis, with the rows per block. The kernel's row numbers refer to these
    // blocks.
    neuron_blocks all() const { return { n_blocks, (size_t) block.first, (size_t) block.second }; }

    // Returns the number of blocks of an axis that is longer in the kernel, from its extents alone. 1: the group's
    // elements come first in the kernel's axis.
    int64_t of(int64_t ne, int64_t more) const;

    int64_t of(const tensor_pair & t, int axis) const { return of(t.ne(axis), t.more(axis)); }

    // Returns the blocks of a tensor along an axis, in bytes.
    neuron_blocks bytes_of(const tensor_pair & t, int axis) const;

    // Returns whether a view of a node is one of its blocks, alone or with the blocks behind it, along the node's axes
    // or as a matrix. If so, sets the values beyond the view's elements.
    bool refer(const node & whole, input & in) const;

    // Returns whether a node is a CONCAT of blocks and one more block. If so, sets the values beyond its elements.
    bool follow_concat(node & n) const;

    // Returns whether a node has rows of several blocks.
    bool has(const node & n) const;

    // Returns whether a source holds row numbers of blocks from a slot, which are computed for the kernel.
    bool are_named(const node & n, size_t source) const;

  private:
    bool find_tokens(const std::vector<node> & nodes);

    int64_t                     n_blocks = 0;                 // 0: rows are in no blocks
    std::pair<int64_t, int64_t> block{};                      // rows per block, in the group and in the kernel

    std::unordered_map<const neuron_key_node *, int> joined;  // nodes that join blocks, and the axis
};

}  // namespace neuron_fit
