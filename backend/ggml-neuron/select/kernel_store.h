// The kernel bundles that the backend plays, and which kernel computes a graph node.

#pragma once

#include "../../bundle/src/hash.h"
#include "ggml.h"
#include "neuron_kernels.h"
#include "nrt.h"
#include "select/group.h"
#include "select/group_index.h"
#include "select/kernel.h"
#include "select/laid_out.h"
#include "select/tokens.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

struct neuron_attention;  // select/unfused_attention.h

// What is known of a node by its op and its tensors alone.
struct neuron_answer {
    neuron_group group;           // of any node like it
    bool         member = false;  // some group has such a node, or may have it with another number of tokens
};

// All bundles, in the order in which they are searched. They are added before the first search and never removed, so
// that any number of threads may search.
class neuron_kernel_store {
  public:
    // Opens what GGML_NEURON_KERNEL_DIR names and then the embedded tables, as far as they fit the device. What does not
    // fit, or can't be opened, is reported and left out.
    void open(const neuron_nrt & nrt, const std::vector<const neuron_kernels_table *> & embedded);

    // Returns what computes a node: the kernel for it as it is, else kernels for other numbers of tokens and longer caches, and for one
    // stream after the other, else one that the node is laid out for. A group without pieces when nothing does.
    neuron_group select(const ggml_tensor * op) const;

    // Returns what `select` does, and whether groups may have the node. It is kept, as ggml's scheduler asks for each node of a graph, each
    // time that it divides one: bundles don't change, so that it stays right. What devices differ in is not part of it.
    std::shared_ptr<const neuron_answer> answer(const ggml_tensor * op) const;

    // Finds what computes attention, all of its nodes, and completes its group; returns whether there is something.
    bool select(neuron_attention & attention) const;

    // Returns the kernels that would compute a node as one of attention, with all those before it; none when it is in no attention that
    // can be computed so far. What follows the node is not known to those who ask.
    std::vector<neuron_kernel> select_in_attention(const ggml_tensor * op) const;

    // Returns how many rows what kernels write to has, of those that write rows like a tensor's the fewest that are at least `n`; 0 where
    // there are none.
    int64_t rows_written(const ggml_tensor * t, int64_t n) const;

    // Returns how many candidates samplers of kernels choose from: all of a vocabulary, what a top-k leaves of it, and one.
    const std::set<int64_t> & candidates() const { return sampled; }

    // Returns whether some kernel has attention with sinks of so many heads.
    bool has_sinks(int64_t n_heads) const { return sinks.count(n_heads) != 0; }

    // Calls a function with every kernel of an op (nk::hash_op), by its id and what its key says.
    void for_each(uint64_t op_hash, const std::function<void(const char * id, const neuron_signature &)> & use) const;

    // Returns the kernel with the key of a graph, or none.
    neuron_kernel find_graph(const std::vector<uint64_t> & words) const;

    // Which groups of nodes there are graph kernels for.
    neuron_group_index groups;

    // Calls a function with every graph kernel.
    template <typename F> void for_each_graph(F function) const {
        for (const auto & bundle : bundles) {
            for (const int32_t number : bundle->graphs) {
                function(neuron_kernel{ bundle.get(), number });
            }
        }
    }

    // Returns whether some kernel computes this op on inputs of these types, whatever their shapes.
    bool has_signature(const ggml_tensor * op) const;

    // Returns whether some kernel computes this op on this weight, its first source, in a layout (weights/layouts.h).
    bool has_weight(const ggml_tensor * op, const ggml_tensor * weight, int32_t layout) const;

    // Returns whether some kernel takes weights in a layout.
    bool has_layout(int32_t layout) const;

    // Returns whether some kernel computes the op of this name (`mul_mat`).
    bool has_op(const char * name) const;

    // Returns whether the kernels make up a transformer's whole graph, so that its weights and KV cache are best kept in
    // device memory: there is at least one kernel for a norm, a matrix product, attention (FLASH_ATTN_EXT, or SOFT_MAX
    // between products) and the write to the KV cache (SET_ROWS or CPY).
    bool covers_transformer() const;

    // Returns the target that the first bundle is compiled for, and its LNC; "" and 0 without bundles.
    std::string target() const;
    uint32_t    lnc() const;

    // Returns whether only kernels of a node's own shapes are to be found (GGML_NEURON_EXACT).
    bool is_exact_only() const { return exact_only; }

    size_t n_bundles() const { return bundles.size(); }

    size_t n_kernels() const;

    neuron_programs programs() const;

  private:
    void open_path(const neuron_nrt & nrt, const std::string & path);
    void open_bundle(const neuron_nrt & nrt, const std::string & path, bool is_tree);
    void add(const neuron_nrt & nrt, neuron_kernels * handle, std::string origin);

    neuron_kernel find(const neuron_signature & node) const;
    neuron_group  select_exact(const ggml_tensor * op, const neuron_signature & node) const;
    neuron_group  select_pieces(const ggml_tensor * op, neuron_signature & node) const;
    neuron_group  select_laid_out(const ggml_tensor * op, const neuron_signature & node) const;
    neuron_kernel find_piece(const neuron_sizes & s, const neuron_signature & node, const neuron_cut & cut) const;

    void read_signatures(neuron_bundle & bundle);
    void add_heads(const neuron_signature & kernel);
    void add_written(const neuron_kernels_tensor & into);
    void add_candidates(uint64_t op, const neuron_kernels_tensor & result);
    void add_sinks(uint64_t op, size_t source, const neuron_kernels_tensor & t);
    void read_graph(neuron_bundle & bundle, int32_t number, const uint64_t * key, size_t n_words);

    struct answer_hash {
        size_t operator()(const std::vector<uint64_t> & key) const {
            return (size_t) nk::hash_words(key.data(), key.size());
        }
    };

    neuron_token_index    tokens;
    neuron_laid_out_index laid_out;
    bool                  exact_only = false;  // GGML_NEURON_EXACT

    // Rows and columns of what products of several heads have, by the number of heads; ascending in columns.
    std::unordered_map<int64_t, std::vector<neuron_sizes>> heads;

    // Numbers of rows of what SET_ROWS writes to, by type and width.
    std::map<std::pair<int32_t, int64_t>, std::set<int64_t>> written;

    std::set<int64_t> sampled{ 1 };
    std::set<int64_t> sinks;  // heads that attention has them of

    std::vector<std::unique_ptr<neuron_bundle>> bundles;

    // By all that they depend on.
    mutable std::mutex                                                                                   answers_mutex;
    mutable std::unordered_map<std::vector<uint64_t>, std::shared_ptr<const neuron_answer>, answer_hash> answers;
};

// Returns a tensor as the bundle library has it; absent for NULL.
neuron_kernels_tensor neuron_tensor_of(const ggml_tensor * t);

// Returns what a node is known by: its op, its tensors and their aliasing.
neuron_signature neuron_signature_of(const ggml_tensor * op);

// Returns it without the op's hash, which a search for the kernel of a node as it is does not need.
neuron_signature neuron_unhashed_signature_of(const ggml_tensor * op);

// Returns which source's memory a node writes its result to, or NEURON_KERNELS_NO_ALIAS.
int neuron_alias_of(const ggml_tensor * op);

// Returns the sources that a node changes besides the one whose memory its result shares, as bits: AdamW's momenta.
uint32_t neuron_updates_of(const ggml_tensor * op);

// Returns the number of sources, absent ones before the last one counted.
int neuron_n_src(const ggml_tensor * op);

// Returns whether nodes of an op only give another tensor's memory a shape.
bool neuron_is_view_op(enum ggml_op op);

// Returns whether a node has nothing to compute: no elements, or none to write to its destination.
bool neuron_is_noop(const ggml_tensor * op);

// Returns whether a node of a graph has to be computed at all.
bool neuron_is_work(const ggml_tensor * node);

// Returns whether a node's result is 0 in all its elements, because each sums products over a source without elements, or
// stands beside one. A kernel has no such inputs.
bool neuron_is_zero(const ggml_tensor * op);
