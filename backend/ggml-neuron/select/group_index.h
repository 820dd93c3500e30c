// The groups of nodes that the bundles have kernels for, indexed by their nodes.
//
// A node's token is a hash of its op, parameters and tensors, without the places of its operands. The index finds
// groups by their tokens, so searching a graph takes time proportional to its nodes; the whole key then shows whether a
// kernel computes exactly the group (select/groups.h). Groups of other lengths are found by tokens without extents;
// select/group_lengths.h then checks whether a kernel computes such a group.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// Hashes of the prefixes of a sequence of tokens, from which the hash of any part is computed.
class neuron_token_hashes {
  public:
    neuron_token_hashes() = default;
    explicit neuron_token_hashes(const std::vector<uint64_t> & tokens);

    size_t size() const { return prefixes.size() - 1; }

    // Returns the hash of the n tokens from `first` on.
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

// Groups with the same tokens. They may differ in their wiring, and in which results are used outside.
struct neuron_group_pattern {
    neuron_token_hashes              tokens;
    std::unordered_set<uint64_t>     wirings;  // hashes of their keys without the escape flags
    std::vector<neuron_group_kernel> kernels;
};

// Graph kernels of groups with the same tokens except for extents.
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

    // Returns whether some group has kernels for any numbers of its nodes (select/numbers.h).
    bool has_open() const { return open; }

    // Returns whether some group has such a node.
    bool has_member(const ggml_tensor * node) const;

    // Returns whether some group has a node that differs from this one only in the numbers of tokens and cells, and
    // could have this node's numbers in pieces or with padding.
    bool may_have_member(const ggml_tensor * node) const;

    // Returns the most cells that groups attend to, if a node is attention to more cells; else 0.
    int64_t fewer_cells(const neuron_signature & node) const { return open_members.fewer_cells(node); }

    // Returns whether some group has a node that differs from this one only in lengths that are shorter here, in any of
    // its tensors. An example is attention without a cache, which has as many keys as tokens.
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
    neuron_token_index open_members;                                     // without their numbers (select/numbers.h)
    std::unordered_map<uint64_t, std::vector<neuron_signature>> shapes;  // of members, by tokens without extents
    bool                                                        causal = false;
    bool                                                        open   = false;
};

// The parts of a node's tensors and numbers that its token includes. WHOLE excludes numbers if a kernel may be for any.
enum class neuron_token_kind { WHOLE, WITHOUT_EXTENTS, WITH_NUMBERS };

// Returns the token of a node, or 0 for a node that no kernel computes.
uint64_t neuron_token_of(const ggml_tensor * node, neuron_token_kind kind = neuron_token_kind::WHOLE);

// Returns the hash of a graph's key without the escape flags.
uint64_t neuron_wiring_hash(const uint64_t * key, size_t n_words);

// Sets `words` to a tensor's words in a key. Returns false when no key can have such a tensor.
bool neuron_tensor_words(const ggml_tensor * t, uint64_t * words);
