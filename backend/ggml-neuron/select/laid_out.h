// A node by a kernel for more along axes that are not its outermost ones, as those of a product of heads, or of attention to results of
// the call itself: its tensors lie in scratch memory as the kernel has them, where the host puts them.
//
// An element of the node's tensors has the same place along each axis in the kernel's. What is beyond is 0, so that it adds nothing to a
// product, and -inf in the columns of a mask. What the kernel computes beyond is dropped. A tensor is copied for each node, so this is
// the last of all ways, and for tensors of the call alone: weights and caches are used where they are.

#pragma once

#include "ggml.h"
#include "select/kernel.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

// A tensor as a node and as its kernel have it.
struct neuron_laid {
    neuron_kernels_tensor own{};
    neuron_kernels_tensor kernel{};
    bool                  hides   = false;  // a mask
    bool                  is_read = true;   // else it is written alone

    // Returns the kernel's bytes for those of the node.
    std::vector<uint8_t> lay_out(const uint8_t * data) const;

    // Sets the node's bytes, which have no gaps, to those of the kernel.
    void take_back(const uint8_t * data, uint8_t * own_data) const;

    bool operator==(const neuron_laid & other) const;
};

// What lays a node out: of each source, and then of the result. Those that the kernel has as the node does are not laid out, and have a
// kernel without a type.
using neuron_layout_of_node = std::vector<neuron_laid>;

// Kernels that nodes are laid out for.
class neuron_laid_out_index {
  public:
    void add(const neuron_signature & kernel, const neuron_bundle * bundle, int32_t number);

    // Returns the kernel with the fewest bytes that computes a node, or none, and sets `layout`.
    neuron_kernel find(const ggml_tensor * op, const neuron_signature & node, neuron_layout_of_node & layout) const;

  private:
    struct kernel {
        neuron_signature      signature;
        const neuron_bundle * bundle;
        int32_t               number;
    };

    std::unordered_map<uint64_t, std::vector<kernel>> kernels;
};

// Returns whether a tensor is of a call: no weight and no cache.
bool neuron_is_of_call(const ggml_tensor * t);
