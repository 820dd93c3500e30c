// Calls of one or several sequences, each with its own cache, in the form that kernels for groups have: each sequence
// has its own nodes for attention and for writes to the cache, and CONCAT joins the results. The same holds for each
// node of attention without flash attention.
//
// ggml has one node of attention for such a call, whose strides contain the length of a cache. Here each sequence's
// part of its cache, of the row numbers and of the mask is its own tensor, as in a call of one sequence, so that
// kernels work with caches of any length (tools/kernelgen/model/streams.py). The search finds groups in this graph, and
// `restore` converts them to groups of ggml's nodes.

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

// A part of an input tensor of the graph.
struct neuron_stream_part {
    ggml_tensor * whole  = nullptr;
    size_t        offset = 0;
    int64_t       first  = 0;  // for row numbers: the first row of the sequence's cache
    int64_t       begin  = 0;  // for row numbers: the first number's place in the tensor
    int64_t       n      = 0;
};

class neuron_streams {
  public:
    // left  nodes that stay unchanged
    neuron_streams(const ggml_cgraph * cgraph, const std::unordered_set<int> & left);

    // Returns whether the graph equals ggml's, so that this object is not needed.
    bool empty() const { return parts_of.empty(); }

    // Returns whether some attention has several sequences.
    bool has_several() const {
        return std::any_of(found.begin(), found.end(), [](const auto & cache) { return cache.second.n > 1; });
    }

    const ggml_cgraph * graph() const { return &split; }

    // Returns the number of ggml's node for a node of the graph that is equal to it or a part of it.
    int original(int i) const { return originals[(size_t) i]; }

    ggml_tensor * node(int i) const { return whole->nodes[original(i)]; }

    // Returns the number of the last node of the attention that contains a node of ggml's; the node's own number
    // outside attention.
    int unit(int original) const {
        const auto found = attentions.find(original);
        return found == attentions.end() ? original : found->second.last;
    }

    // Returns the number of nodes of the graph for a unit.
    int n_parts(int unit) const {
        const auto found = parts_of.find(unit);
        return found == parts_of.end() ? 1 : found->second;
    }

    // Returns the part that a tensor is, or NULL.
    const neuron_stream_part * part_of(const ggml_tensor * t) const {
        const auto found = given.find(t);
        return found == given.end() ? nullptr : &found->second;
    }

    // For a node that holds the whole result of a node of ggml's, returns ggml's node; any other node unchanged.
    ggml_tensor * result_of(ggml_tensor * node) const {
        const auto found = results.find(node);
        return found == results.end() ? node : found->second;
    }

    // Converts a group of the graph to a group of ggml's.
    void restore(neuron_group & group) const;

  private:
    struct caches {
        size_t  stride = 0;
        int64_t first  = 0;
        int64_t n      = 0;  // 0: the sequences' caches are indistinguishable

        bool operator==(const caches & other) const {
            return stride == other.stride && first == other.first && n == other.n;
        }
    };

    // A node of attention without flash attention.
    struct member {
        int first  = 0;
        int last   = 0;
        int source = -1;  // number of the source with caches, or -1
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
    int                                                                 current = 0;  // node of ggml's graph
    std::unordered_map<int, int>                                        parts_of;     // by unit
    std::unordered_map<int, member>                                     attentions;   // by ggml's nodes
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> split_nodes;  // nodes with intermediate results
    std::unordered_map<const ggml_tensor *, caches>                     found;        // by root
    std::map<std::pair<const ggml_tensor *, size_t>, ggml_tensor *>     made;
    std::unordered_map<const ggml_tensor *, neuron_stream_part>         given;
    std::unordered_map<const ggml_tensor *, ggml_tensor *>              results;
};

// Returns whether a node is attention of several sequences, each with its own cache, or may be the last node of such
// attention.
bool neuron_has_streams(const ggml_tensor * node);
