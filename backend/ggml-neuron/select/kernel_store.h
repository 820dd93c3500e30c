// The kernel bundles of the backend, and the choice of a kernel for a graph node.

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

// The answer about a node. It depends only on the node's op and tensors.
struct neuron_answer {
    neuron_group group;           // for any node of this kind
    bool         member = false;  // some group has such a node, or may have it with another number of tokens
};

// All bundles, in the order of the search. They are added before the first search and never removed, so any number of
// threads may search.
class neuron_kernel_store {
  public:
    // Opens the bundles that GGML_NEURON_KERNEL_DIR names, and then the embedded tables. Reports and leaves out bundles
    // that do not fit the device or can't be opened.
    void open(const neuron_nrt & nrt, const std::vector<const neuron_kernels_table *> & embedded);

    // Returns the kernels for a node: the exact one, else kernels for other numbers of tokens and longer caches, or for
    // one stream after the other, else a kernel for which the node's tensors are laid out. Returns a group without
    // pieces when no kernel fits.
    neuron_group select(const ggml_tensor * op) const;

    // Returns the result of `select`, and whether groups may have the node. The answer is cached, because ggml's
    // scheduler calls supports_op for each node whenever it divides a graph, and bundles do not change. The answer is
    // the same for all devices.
    std::shared_ptr<const neuron_answer> answer(const ggml_tensor * op) const;

    // Finds the kernels for all nodes of attention and completes its group. Returns whether there are any.
    bool select(neuron_attention & attention) const;

    // Returns the kernels that would compute a node as a part of attention, together with all earlier nodes of that
    // attention. Returns none when the node is in no attention that can be computed so far. The caller does not have
    // the later nodes.
    std::vector<neuron_kernel> select_in_attention(const ggml_tensor * op) const;

    // Returns the most cells that kernels attend to, if a node is attention to more cells; else 0. llama.cpp reserves
    // memory for attention to all cells of a cache, and calls attend to the cells in use.
    int64_t fewer_cells(const ggml_tensor * op) const;

    // Returns the smallest number of rows, at least `n`, of a tensor to which kernels write rows like this tensor's
    // rows; 0 if there is none.
    int64_t rows_written(const ggml_tensor * t, int64_t n) const;

    // Returns the numbers of candidates that kernels of samplers have: the whole vocabulary, the results of a top-k,
    // and 1.
    const std::set<int64_t> & candidates() const { return sampled; }

    // Returns whether some kernel has attention with sinks for this many heads.
    bool has_sinks(int64_t n_heads) const { return sinks.count(n_heads) != 0; }

    // Calls a function with every kernel of an op (nk::hash_op): its id and its signature from the key.
    void for_each(uint64_t op_hash, const std::function<void(const char * id, const neuron_signature &)> & use) const;

    // Returns the kernel with the key of a graph, or an empty one.
    neuron_kernel find_graph(const std::vector<uint64_t> & words) const;

    // The groups of nodes that have graph kernels.
    neuron_group_index groups;

    // Calls a function with every graph kernel.
    template <typename F> void for_each_graph(F function) const {
        for (const auto & bundle : bundles) {
            for (const int32_t number : bundle->graphs) {
                function(neuron_kernel{ bundle.get(), number });
            }
        }
    }

    // Returns whether some kernel computes this op on inputs of these types, of any shape.
    bool has_signature(const ggml_tensor * op) const;

    // Returns whether some kernel computes this op on this weight, its first source, in a layout (weights/layouts.h).
    bool has_weight(const ggml_tensor * op, const ggml_tensor * weight, int32_t layout) const;

    // Returns whether some kernel takes weights in a layout.
    bool has_layout(int32_t layout) const;

    // Returns whether some kernel computes the op of this name (`mul_mat`).
    bool has_op(const char * name) const;

    // Returns whether the kernels cover a transformer's whole graph, so that device memory is best for its weights and
    // KV cache. This requires at least one kernel each for a norm, a matrix product, attention (FLASH_ATTN_EXT, or
    // SOFT_MAX between products) and the write to the KV cache (SET_ROWS or CPY).
    bool covers_transformer() const;

    // Returns the target of the first bundle, and its LNC; "" and 0 without bundles.
    std::string target() const;
    uint32_t    lnc() const;

    // Returns whether only kernels of a node's exact shapes count (GGML_NEURON_EXACT).
    bool is_exact_only() const { return exact_only; }

    size_t n_bundles() const { return bundles.size(); }

    size_t n_kernels() const;

    neuron_programs programs() const;

  private:
    void open_path(const neuron_nrt & nrt, const std::string & path);
    void open_pack(const neuron_nrt & nrt, const std::string & path);
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

    // Rows and columns of the matrices in products of several heads, by the number of heads; ascending in columns.
    std::unordered_map<int64_t, std::vector<neuron_sizes>> heads;

    // Numbers of rows of the tensors that SET_ROWS writes to, by type and width.
    std::map<std::pair<int32_t, int64_t>, std::set<int64_t>> written;

    std::set<int64_t> sampled{ 1 };
    std::set<int64_t> sinks;  // numbers of heads in attention with sinks

    std::vector<std::unique_ptr<neuron_bundle>> bundles;

    // By a vector of all inputs of the answer.
    mutable std::mutex                                                                                   answers_mutex;
    mutable std::unordered_map<std::vector<uint64_t>, std::shared_ptr<const neuron_answer>, answer_hash> answers;
};

// Returns a tensor in the bundle library's form; absent for NULL.
neuron_kernels_tensor neuron_tensor_of(const ggml_tensor * t);

// Returns a node's signature: its op, its tensors and their aliasing.
neuron_signature neuron_signature_of(const ggml_tensor * op);

// Returns the signature without the op's hash, which the search for an exact kernel does not need.
neuron_signature neuron_unhashed_signature_of(const ggml_tensor * op);

// Returns the number of the source whose memory receives a node's result, or NEURON_KERNELS_NO_ALIAS.
int neuron_alias_of(const ggml_tensor * op);

// Returns the sources that a node changes, besides the one that its result aliases, as bits: AdamW's momenta.
uint32_t neuron_updates_of(const ggml_tensor * op);

// Returns the number of sources, including absent ones before the last.
int neuron_n_src(const ggml_tensor * op);

// Returns whether nodes of an op only reshape another tensor's memory.
bool neuron_is_view_op(enum ggml_op op);

// Returns whether a node has nothing to compute: no elements, or none to write to its destination.
bool neuron_is_noop(const ggml_tensor * op);

// Returns whether a node of a graph has to be computed at all.
bool neuron_is_work(const ggml_tensor * node);

// Returns whether all elements of a node's result are 0, because each is a sum over a source without elements, or
// stands beside such a source. A kernel has no such inputs.
bool neuron_is_zero(const ggml_tensor * op);
