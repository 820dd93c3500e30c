// llama.cpp's probe of a device before it samples there (--backend-sampling).
//
// For each sampler llama.cpp makes a graph with as many candidates as a typical vocabulary has tokens, whatever the
// model's size, and calls supports_op for each node (llama_sampler_backend_support). If the device refuses one, the CPU
// computes this sampler and all later ones. A bundle has kernels for the model's vocabulary, and for the results of a
// top-k. So the device answers for the node with the bundle's number of candidates.

#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>

// Returns the number of candidates in the probe's graph that has this node, or 0 for any other node.
int64_t neuron_probed_candidates(const ggml_tensor * op);

// Returns whether a node's result has as many elements as a kernel's candidates: llama.cpp adds a row to the logits
// before it samples from a row of them, and a top-k reduces their number.
bool neuron_has_candidates(const ggml_tensor * op);

// A node of such a graph with another number of candidates; its sources have no sources.
struct neuron_probe_node {
    neuron_probe_node(const ggml_tensor * op, int64_t probed, int64_t candidates);
    neuron_probe_node(const neuron_probe_node &)             = delete;
    neuron_probe_node & operator=(const neuron_probe_node &) = delete;

    ggml_tensor                           node;
    std::array<ggml_tensor, GGML_MAX_SRC> sources;
};
