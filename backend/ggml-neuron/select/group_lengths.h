// Graph kernels have exact lengths, graphs any: which kernels for more tokens, or for a longer cache, compute a group.
//
// The group's key and the kernel's say the same but for extents, of which the kernel's are larger somewhere. Going through the
// nodes in their order shows that the group's elements come out of the kernel as they should: that each is computed from
// the group's own alone, by the rules that stand beside each op in tools/kernelgen/ggml/ops.py, whatever is beyond; and that nothing
// is written beyond. What a kernel reads beyond is then one of three: copies of the group's rows; a cache that goes on, under a
// mask; columns of the mask, which hide it. With flash attention one op hides; without it the scores of cells go through
// several, which are followed to where they are summed with weight 0.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// What a kernel for longer groups finds in a slot beyond the group's own bytes, or leaves in a result.
struct neuron_group_room {
    enum kind_t : uint8_t {
        NONE,   // it has the same bytes
        ROWS,   // the rows again; of a result anything
        CELLS,  // what is there in memory: the cache goes on
        MASK,   // columns that hide, and then the rows again
    };

    kind_t  kind    = NONE;
    size_t  size    = 0;  // bytes that the kernel has
    size_t  period  = 0;  // ROWS: bytes of the group's rows, from the first one to where it comes again
    int64_t columns = 0;  // MASK: that the kernel has
    int64_t rows    = 0;  // the same
    size_t  node    = 0;  // MASK: a node of the group of which the mask is a source
    size_t  source  = 0;  // which one
};

struct neuron_group_fit {
    std::vector<neuron_group_room> slots;
    std::vector<neuron_group_room> results;      // of those that are seen outside, in the order of the nodes
    int64_t                        padding = 0;  // rows of the first node beyond the group's own
};

// Returns whether the kernel with one key of n_words computes the group of nodes with another one, and sets `fit`. Both are keys of
// graphs without mistakes.
bool neuron_fit_group(const uint64_t * group, const uint64_t * kernel, size_t n_words, neuron_group_fit & fit);

// Returns whether some rows of a group of nodes, wherever they begin, are a group of nodes of fewer rows, with the key `rows`, in
// all but what attention sees of a cache that others of the rows are written to; sets `fit`, of which each ROWS has rows that
// are cut.
bool neuron_fit_rows(const uint64_t * rows, const uint64_t * group, size_t n_words, neuron_group_fit & fit);
