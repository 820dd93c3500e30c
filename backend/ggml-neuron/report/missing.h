// Messages, whatever GGML_NEURON_LOG is, about ops of graphs that no kernel computes: each once, with the reason and the line
// of a manifest that would mend it; GGML_NEURON_LOG=2 adds the kernel that is nearest.

#pragma once

#include "ggml.h"
#include "select/kernel_store.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Nodes of a graph that is computed, and that no kernel computes, as far as entries of a manifest tell them apart.
class neuron_missing_ops {
  public:
    void add(const ggml_tensor * op);

    // Prints the ops that this process has not named yet: NEURON_MOST_LINES of them, then the number of the others. Ops that most nodes
    // have come first, so that the order does not depend on addresses. Ops whose kernels can't be used have a message of their own.
    // `graph` says in words which graph has them. While the backend records ops, this prints nothing. Returns whether it prints something.
    bool say(const neuron_kernel_store & kernels, const char * graph = "this graph") const;

  private:
    struct entry {
        const ggml_tensor * op;
        uint64_t            fingerprint;
        size_t              count;
    };

    std::map<uint64_t, size_t> numbers;  // by neuron_fingerprint
    std::vector<entry>         entries;
};

// Returns the kernel of the same op from which a node differs least, and how: "ID: input 1 is …, not …"; "" when there is no
// kernel of this op. Fewest things that differ count (a tensor, a parameter, which input the result shares memory with), then
// fewest dimensions and strides: as kernelgen coverage says it.
std::string neuron_nearest(const ggml_tensor * op, const neuron_kernel_store & kernels);
