// Messages, at any GGML_NEURON_LOG, about ops of graphs that no kernel computes. Each appears once, with the reason and
// the line of a manifest that would add the kernel; GGML_NEURON_LOG=2 adds the nearest kernel.

#pragma once

#include "ggml.h"
#include "select/kernel_store.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Nodes of a computed graph without a kernel; nodes with equal manifest entries count as one.
class neuron_missing_ops {
  public:
    void add(const ggml_tensor * op);

    // Prints the ops that this process has not reported yet: NEURON_MOST_LINES of them, then the number of the others.
    // Ops with the most nodes come first, so that the order does not depend on addresses. Ops whose kernels are
    // unusable have their own message. Prints nothing while the backend records ops.
    void say(const neuron_kernel_store & kernels) const;

  private:
    struct entry {
        const ggml_tensor * op;
        uint64_t            fingerprint;
        size_t              count;
    };

    std::map<uint64_t, size_t> numbers;  // by neuron_fingerprint
    std::vector<entry>         entries;
};

// Returns the kernel of the same op with the fewest differences from a node, and the differences: "ID: input 1 is …,
// not …". Returns "" when no kernel has this op. The number of differing items (a tensor, a parameter, the aliased
// input) counts first, then the number of dimensions and strides. kernelgen coverage prints the same.
std::string neuron_nearest(const ggml_tensor * op, const neuron_kernel_store & kernels);
