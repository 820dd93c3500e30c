// Builders of graphs with groups, by name, from which scenarios are made. main.cpp describes scenarios.

#pragma once

#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "select/groups.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

// A graph, and its groups of computed nodes.
struct graph {
    ggml_context_ptr ctx;
    ggml_cgraph *    cgraph = nullptr;
    ggml_tensor *    result = nullptr;

    std::vector<ggml_tensor *>       inputs;
    std::vector<ggml_tensor *>       written;           // inputs that the graph changes
    std::vector<ggml_tensor *>       causal;            // masks that hide later tokens' writes
    ggml_tensor *                    mask   = nullptr;  // a mask that hides from token t all cells from before + t on
    int64_t                          before = 0;
    ggml_tensor *                    places = nullptr;  // row numbers of writes to a transposed cache
    int64_t                          n_cell = 0;        // number of the cache's cells
    ggml_tensor *                    rows   = nullptr;  // row numbers of writes to a cache, which may be moved
    int64_t                          far    = 0;        // the number of rows to move them by
    std::vector<std::pair<int, int>> groups;            // the first and the last computed node of each
    int                              launches;          // expected launches of groups

    graph() {
        ggml_init_params params = { ggml_tensor_overhead() * 256 + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
        cgraph = ggml_new_graph(ctx.get());
    }

    ggml_context * get() const { return ctx.get(); }

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(get(), type, ne0, ne1, ne2);
        ggml_set_input(t);
        inputs.push_back(t);
        return t;
    }

    // Makes a tensor that a program keeps from one graph to the next.
    ggml_tensor * cache(ggml_type type, int64_t ne0, int64_t ne1) {
        inputs.push_back(ggml_new_tensor_2d(get(), type, ne0, ne1));
        return inputs.back();
    }

    // Adds a node and its sources to the graph, in this order.
    ggml_tensor * add(ggml_tensor * node) {
        ggml_build_forward_expand(cgraph, node);
        return node;
    }

    std::vector<ggml_tensor *> work() const {
        std::vector<ggml_tensor *> nodes;
        for (int i = 0; i < cgraph->n_nodes; i++) {
            ggml_tensor * node = cgraph->nodes[i];
            if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) && !neuron_is_view_op(node->op)) {
                nodes.push_back(node);
            }
        }
        return nodes;
    }

    // Ends the graph with a result. The groups are the nodes from `first` on, with these sizes.
    void end(ggml_tensor * t, int first, const std::vector<int> & sizes) {
        result = add(t);
        ggml_set_output(result);
        for (ggml_tensor * changed : written) {
            ggml_set_output(changed);  // so that it shares memory with no other tensor
        }
        for (const int n : sizes) {
            groups.emplace_back(first, first + n - 1);
            first += n;
        }
        launches = (int) sizes.size();
    }
};

using builder = std::function<void(graph &)>;

// A norm, its weights and a product, for `n` tokens: the beginning of nearly every layer.
struct norm_options {
    int64_t   n       = 4;
    ggml_type type    = GGML_TYPE_F16;
    float     eps     = 1e-5f;
    bool      gaps    = false;  // between the rows of x
    bool      swapped = false;  // the other order of a product's sources
    bool      add     = false;  // a sum in place of the product
    bool      same    = false;  // x is also the weight
    bool      inplace = false;
    bool      shared  = false;  // x and the weight are parts of one tensor
    bool      twice   = false;  // the norm is also the weight
    bool      added   = false;  // the weight is added
};

ggml_tensor * norm(graph & g, ggml_tensor * x, const norm_options & o = {});

ggml_tensor * product(graph & g, ggml_tensor * t, const norm_options & o = {});

void hit(graph & g);

// Two of these with different weights, which one kernel computes.
void twice_of(graph & g, int64_t n);

void twice(graph & g);

// Two groups, and a node between them that is computed by itself.
void between(graph & g);

// A write to a cache, and reads through the cache's tensor and at an offset.
void cache_of(graph & g, int64_t n, int64_t n_seen);

void cache(graph & g);

struct attention_options {
    int64_t n        = 2;
    int64_t n_seen   = 64;     // cells
    int64_t n_cell   = 96;     // number of the cache's cells
    bool    masked   = true;
    bool    writes   = true;   // to the cache
    bool    causal   = false;  // the mask is causal
    bool    computed = false;  // the mask is the result of a node before the group
    int64_t before   = 0;  // cells that the first token attends to, for kernels that leave out cells; 0: other kernels
    bool    kept     = false;  // the cache is kept from one graph to the next
    int64_t far      = 0;      // distance in rows of the moved writes to the cache
};

// A layer's attention: the KV cache is written and read.
void attention_of(graph & g, const attention_options & o);

void attention(graph & g);

// Attention without flash attention: the cache of values is transposed, and scores are capped.
void scores_of(graph & g, const attention_options & o);

// Writes the mask of attention of 5 tokens and 32 cells: its second input receives the content of its first.
void copied_mask(graph & g);

attention_options unmasked(int64_t n, int64_t n_seen);

attention_options reading(int64_t n_seen, int64_t n_cell);

// Results in the memory of earlier nodes, of a slot, and of a part of a slot.
void in_place_of(graph & g, int64_t n, bool tied = false);

void in_place(graph & g);

// Halves of rows, as in a GLU, and a transposed product.
void views_of(graph & g, int64_t n);

void views(graph & g);

// Three results are used outside: a later node reads one, one is an output, and one is the graph's last node.
void several_results_of(graph & g, int64_t n);

void several_results(graph & g);

// Temporary results become the group's inputs, each read by one node: without care the allocator gives their memory to
// results of the group.
void kept(graph & g);

void shorter(std::map<std::string, builder> & b);

attention_options causal(int64_t n, int64_t n_seen);

// Caches of other lengths than the kernels'.
void lengths_of_caches(std::map<std::string, builder> & b);

// Attention with kernels that leave out cells that the mask hides.
void hidden_cells(std::map<std::string, builder> & b);

// Groups that are launched in pieces, with the number of launches, and groups that are not.
void pieces(std::map<std::string, builder> & b);

const std::map<std::string, norm_options> & mutations();

// All tensors have the same shape, for tests where the order of sources or the wiring must matter.
void square(graph & g, const norm_options & o);

void square_group(graph & g);

// One tensor, or its parts, fills several slots of a kernel: this is equivalent if no node writes to it.
norm_options one_tensor(bool shared);

void tied_wiring(graph & g);

void tied_roots(graph & g);

// A kernel with one slot, which is not equivalent to several tensors.
void tied(graph & g);

void mutated(graph & g, const norm_options & o);

// A slot that is written is also read through another slot.
void mutated_written(graph & g);

// The middle result is used after the group.
void escapes(graph & g);

// A node outside uses a part of the middle result.
void part_escapes(graph & g);

void middle_is_output(graph & g);

// The graph ends within the group.
void ends_early(graph & g);

constexpr int ANY = -1;  // number of launches

// Returns a graph's builder. `lengths-<seed>`, or `lengths-<seed>-<tokens>x<cells>`, is a random graph of these
// lengths.
builder find_builder(const std::string & name);

// Reads a group and prints its key's words. A group is a line of numbers and names: the number of nodes; then for each
// node its op, whether it escapes, its 16 parameters, the number of its inputs, the inputs, and its result. A tensor is
// a reference, an offset, type, ne and nb. A reference is `s<i>`, `n<i>` or, for a result with its own memory, `own`;
// an absent input is `-`.
void print_words(const std::string & line);
