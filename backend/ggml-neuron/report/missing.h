// Messages, at any GGML_NEURON_LOG, about ops of graphs that no kernel computes. Each appears once, with the reason; the
// commands that add the kernels follow.

#pragma once

#include "ggml.h"
#include "select/kernel_store.h"

#include <cstddef>
#include <map>
#include <string>

// Returns a node's op and inputs: "mul_mat of (64,4,1,1)/f32, (64,2,1,1)/f32".
std::string neuron_describe(const ggml_tensor * op);

// Nodes of a computed graph without a kernel; nodes with equal descriptions count as one.
class neuron_missing_ops {
  public:
    void add(const ggml_tensor * op);

    // Prints the ops that this process has not reported yet: NEURON_MOST_LINES of them, then the number of the others.
    // Ops with the most nodes come first. Ops whose kernels are unusable have their own message. Prints nothing while
    // the backend records.
    void say(const neuron_kernel_store & kernels) const;

  private:
    struct entry {
        const ggml_tensor * op;
        size_t              count;
    };

    std::map<std::string, entry> entries;
};
