// Blocks of rows: the tokens of each sequence, where attention is a node for each of several (select/group_lengths.h).

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
    // Finds the tokens of a sequence where several have a node of attention each, which CONCAT puts after one another. Returns false where
    // they have different numbers of tokens, or where something else has rows that are not known to be in such blocks.
    bool find(const std::vector<node> & nodes, bool any_rows);

    // Returns whether rows are in blocks.
    explicit operator bool() const { return n_blocks != 0; }

    // Returns the most blocks that an axis has, as the kernel's numbers of their rows are made.
    neuron_blocks all() const { return { n_blocks, (size_t) block.first, (size_t) block.second }; }

    // Returns how many blocks an axis is that the kernel has more of: extents alone say so. 1: its own elements are the first ones.
    int64_t of(int64_t ne, int64_t more) const;

    int64_t of(const tensor_pair & t, int axis) const { return of(t.ne(axis), t.more(axis)); }

    // Returns the blocks of a tensor along an axis, in bytes.
    neuron_blocks bytes_of(const tensor_pair & t, int axis) const;

    // Returns whether a view of a node is one of its blocks, alone or with others behind each other, as its axes are or as a matrix.
    // Sets what is beyond the view's elements then.
    bool refer(const node & whole, input & in) const;

    // Returns whether a node is CONCAT of blocks and one behind them, and sets what is beyond its elements then.
    bool follow_concat(node & n) const;

    // Returns whether a node has rows of several blocks.
    bool has(const node & n) const;

    // Returns whether numbers of rows of blocks are those of a slot, which are made for the kernel.
    bool are_named(const node & n, size_t source) const;

  private:
    bool find_tokens(const std::vector<node> & nodes);

    int64_t                     n_blocks = 0;                 // 0: rows are in none
    std::pair<int64_t, int64_t> block{};                      // rows of one, of the group and of the kernel

    std::unordered_map<const neuron_key_node *, int> joined;  // nodes that put blocks after one another, with the axis
};

}  // namespace neuron_fit
