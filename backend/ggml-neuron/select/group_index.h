// Which groups of nodes the bundles have kernels for, by what their nodes are.
//
// A node's token is a hash of what it computes, without where its operands are: op, parameters, tensors. Groups are known by
// their tokens, so that a graph is searched in time proportional to its nodes; that a group is what a kernel computes, its
// whole key says (select/groups.h). Groups of other lengths are known by tokens without extents in them; that a kernel computes
// such a group, select/group_lengths.h finds out.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// Hashes of the beginnings of a sequence of tokens, from which that of any part of it follows.
class neuron_token_hashes {
  public:
    neuron_token_hashes() = default;
    explicit neuron_token_hashes(const std::vector<uint64_t> & tokens);

    size_t size() const { return prefixes.size() - 1; }

    // Returns the hash of n tokens from one on.
    uint64_t part(size_t first, size_t n) const { return prefixes[first + n] - prefixes[first] * powers[n]; }

  private:
    std::vector<uint64_t> prefixes{ 0 };
    std::vector<uint64_t> powers{ 1 };
};

struct neuron_bundle;

// A graph kernel.
struct neuron_group_kernel {
    const uint64_t *      key;
    size_t                n_words;
    const neuron_bundle * bundle;
    int32_t               number;
    double                size;  // bytes of all tensors, which grow with each length
};

// Groups whose nodes have the same tokens. They may differ in their wiring, and in which results are seen outside.
struct neuron_group_pattern {
    neuron_token_hashes              tokens;
    std::unordered_set<uint64_t>     wirings;  // hashes of their keys without what is seen outside
    std::vector<neuron_group_kernel> kernels;
};

// Graph kernels of groups whose tokens are the same except for extents.
struct neuron_group_family {
    neuron_token_hashes              tokens;   // without extents
    std::vector<neuron_group_kernel> kernels;  // ascending in size
};

class neuron_group_index {
  public:
    // Adds a graph kernel by its key.
    void add(const neuron_key & key, const neuron_bundle * bundle, int32_t number);

    bool empty() const { return patterns.empty(); }

    // Returns whether attention of some group leaves out cells (neuron_causal_kernel).
    bool has_causal() const { return causal; }

    // Returns whether kernels of some group are for any numbers of its nodes (select/numbers.h).
    bool has_open() const { return open; }

    // Returns whether some group has such a node.
    bool has_member(const ggml_tensor * node) const;

    // Returns whether some group has a node like this one except for the numbers of tokens and cells, and may have one with its numbers: in
    // pieces, or with padding.
    bool may_have_member(const ggml_tensor * node) const;

    // Returns whether some group has a node like this one except for lengths that are shorter here, wherever they stand in its tensors: as
    // those of attention without a cache, whose keys are as many as its tokens.
    bool may_have_shorter_member(const ggml_tensor * node) const;

    // Returns the patterns that begin with a token, longest first, or NULL.
    const std::vector<neuron_group_pattern> * beginning_with(uint64_t token) const;

    // Returns the families that begin with a token without extents and a number of columns, longest first, or NULL.
    const std::vector<neuron_group_family> * families_beginning_with(uint64_t token, int64_t n_columns) const;

  private:
    void add_to_family(const neuron_key & key, const neuron_group_kernel & kernel);

    std::unordered_map<uint64_t, std::vector<neuron_group_pattern>> patterns;
    std::unordered_map<uint64_t, std::vector<neuron_group_family>>  families;
    std::unordered_set<uint64_t>                                    members;
    neuron_token_index                                              open_members;  // with the numbers left open
    std::unordered_map<uint64_t, std::vector<neuron_signature>>     shapes;  // of members, by tokens without extents
    bool                                                            causal = false;
    bool                                                            open   = false;
};

// What a node's token has of its tensors and numbers, of which there are none where kernels may be for any.
enum class neuron_token_kind { WHOLE, WITHOUT_EXTENTS, WITH_NUMBERS };

// Returns the token of a node; 0 when no kernel computes such a node.
uint64_t neuron_token_of(const ggml_tensor * node, neuron_token_kind kind = neuron_token_kind::WHOLE);

// Returns the hash of a graph's key without what is seen outside.
uint64_t neuron_wiring_hash(const uint64_t * key, size_t n_words);

// Sets `words` to those of a tensor in a key. Returns false when no key has such a tensor.
bool neuron_tensor_words(const ggml_tensor * t, uint64_t * words);
