// Calls of one or several sequences with a cache each, as kernels for groups have them: attention and writes to the caches are a node for each
// sequence, and CONCAT puts the results after one another. Without flash attention the same goes for each node of it.
//
// ggml's node for attention of such a call has strides with the length of a cache. Here each sequence's part of its cache, of the
// numbers of rows and of the mask is a tensor of its own, as in a call of one sequence, so that kernels are for caches of any length
// (tools/kernelgen/model/streams.py). Groups are found in this graph, and are then those of ggml's.

#pragma once

#include "ggml-impl.h"
#include "select/group.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// A part of a tensor that is given to a graph.
struct neuron_stream_part {
    ggml_tensor * whole  = nullptr;
    size_t        offset = 0;
    int64_t       first  = 0;  // of numbers of rows: the first one of the sequence's cache
    int64_t       begin  = 0;  // of these numbers, in the tensor
    int64_t       n      = 0;
};

class neuron_streams {
  public:
    // left  nodes that stay as they are
    neuron_streams(const ggml_cgraph * cgraph, const std::unordered_set<int> & left);

    // Returns whether the graph is another than ggml's.
    bool empty() const { return parts_of.empty(); }

    // Returns whether some attention is of several sequences.
    bool has_several() const {
        return std::any_of(found.begin(), found.end(), [](const auto & cache) { return cache.second.n > 1; });
    }

    const ggml_cgraph * graph() const { return &split; }

    // Returns the number of ggml's node of which one of the graph is all or a part.
    int original(int i) const { return originals[(size_t) i]; }

    ggml_tensor * node(int i) const { return whole->nodes[original(i)]; }

    // Returns the number of the node that ends attention of which ggml's node is one; other nodes are alone.
    int unit(int original) const {
        const auto found = attentions.find(original);
        return found == attentions.end() ? original : found->second.last;
    }

    // Returns how many nodes of the graph a unit is.
    int n_parts(int unit) const {
        const auto found = parts_of.find(unit);
        return found == parts_of.end() ? 1 : found->second;
    }

    // Returns the part that a tensor is, or NULL.
    const neuron_stream_part * part_of(const ggml_tensor * t) const {
        const auto found = given.find(t);
        return found == given.end() ? nullptr : &found->second;
    }

    // Returns ggml's node in place of the one that has all of its result, any other as it is.
    ggml_tensor * result_of(ggml_tensor * node) const {
        const auto found = results.find(node);
        return found == results.end() ? node : found->second;
    }

    // Makes a group of the graph one of ggml's.
    void restore(neuron_group & group) const;

  private:
    struct caches {
        size_t  stride = 0;
        int64_t first  = 0;
        int64_t n      = 0;  // 0: they can't be told apart

        bool operator==(const caches & other) const {
            return stride == other.stride && first == other.first && n == other.n;
        }
    };

    // A node of attention without flash attention.
    struct member {
        int first  = 0;
        int last   = 0;
        int source = -1;  // which one is caches, or -1
    };

    void          find_attention(int last);
    void          note_cache(ggml_tensor * t);
    void          find_caches(const std::unordered_set<int> & left);
    bool          add_writes(const ggml_tensor * node);
    bool          add_attention(ggml_tensor * node);
    bool          add_member(ggml_tensor * node);
    ggml_tensor * source_of(ggml_tensor * t, int64_t i, int64_t n, bool is_cache);
    void          join(ggml_tensor * node, const std::vector<ggml_tensor *> & results, int axis);
    void          add(ggml_tensor * node);
    ggml_tensor * make(const ggml_tensor & like);
    ggml_tensor * view_of(const ggml_tensor * t, int axis, int64_t n, int64_t i);
    ggml_tensor * give(ggml_tensor * whole, size_t offset, const ggml_tensor & like);
    ggml_tensor * cache_of(ggml_tensor * root, int64_t i, const ggml_tensor & row);

    const ggml_cgraph *                                                 whole;  // ggml's
    ggml_cgraph                                                         split;
    std::deque<ggml_tensor>                                             tensors;
    std::vector<ggml_tensor *>                                          nodes;
    std::vector<int>                                                    originals;
    int                                                                 current = 0;  // node of ggml's
    std::unordered_map<int, int>                                        parts_of;     // of units
    std::unordered_map<int, member>                                     attentions;   // by ggml's nodes
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> split_nodes;  // whose results are in between
    std::unordered_map<const ggml_tensor *, caches>                     found;        // by roots
    std::map<std::pair<const ggml_tensor *, size_t>, ggml_tensor *>     made;
    std::unordered_map<const ggml_tensor *, neuron_stream_part>         given;
    std::unordered_map<const ggml_tensor *, ggml_tensor *>              results;
};

// Returns whether a node is attention of some of several sequences with a cache each, or may end it.
bool neuron_has_streams(const ggml_tensor * node);
