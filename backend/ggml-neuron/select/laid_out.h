// Nodes that a kernel for larger tensors computes, if the tensors differ along inner axes. Examples are products of heads,
// and attention to results of the same call. The host copies the node's tensors to scratch memory in the kernel's layout.
//
// Each element keeps its index along each axis. Further elements are 0, which adds nothing to a product, or -inf in the
// columns of a mask. Further results are dropped. The host copies tensors for each node, so the backend tries this last,
// and never copies weights or caches.

#pragma once

#include "ggml.h"
#include "select/kernel.h"
#include "select/tokens.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

// The layouts of a tensor in a node and in the node's kernel.
struct neuron_laid {
    neuron_kernels_tensor own{};
    neuron_kernels_tensor kernel{};
    bool                  hides   = false;  // a mask
    bool                  is_read = true;   // false: the node only writes it

    // Returns the node's bytes in the kernel's layout.
    std::vector<uint8_t> lay_out(const uint8_t * data) const;

    // Copies the kernel's bytes to the node's layout, which must be contiguous.
    void take_back(const uint8_t * data, uint8_t * own_data) const;

    bool operator==(const neuron_laid & other) const;
};

// The layouts of a node's sources, and then of its result. If the kernel has the same layout as the node, `kernel` has no
// type, and the tensor is not copied.
using neuron_layout_of_node = std::vector<neuron_laid>;

// Kernels for which nodes can be laid out.
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

// Returns whether a tensor belongs to a single call: it is neither a weight nor a cache.
bool neuron_is_of_call(const ggml_tensor * t);
