// What llama.cpp asks a device for before it samples there (--backend-sampling).
//
// For each sampler llama.cpp makes a graph of as many candidates as most vocabularies have tokens, whatever the model's has, and asks
// supports_op for each node (llama_sampler_backend_support). If the device refuses one, the CPU computes this sampler and all after it.
// A bundle has kernels for the vocabulary, and for what a top-k leaves of it. So the answer is that for the node of as many candidates.

#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>

// Returns how many candidates such a graph has that a node is in, or 0: the node is in none.
int64_t neuron_probed_candidates(const ggml_tensor * op);

// Returns whether the result of a node of a call has as many elements as there are candidates: llama.cpp adds a row to the logits before
// it samples from a row of them, and a top-k leaves some.
bool neuron_has_candidates(const ggml_tensor * op);

// A node of such a graph with another number of candidates; its sources have no sources.
struct neuron_probe_node {
    neuron_probe_node(const ggml_tensor * op, int64_t probed, int64_t candidates);
    neuron_probe_node(const neuron_probe_node &)             = delete;
    neuron_probe_node & operator=(const neuron_probe_node &) = delete;

    ggml_tensor                           node;
    std::array<ggml_tensor, GGML_MAX_SRC> sources;
};
