// Nodes as text: as entries of a manifest, and in words.

#pragma once

#include "ggml.h"
#include "neuron_kernels.h"

#include <cstdint>
#include <string>
#include <vector>

// A node as an entry of a manifest.
struct neuron_manifest_text {
    std::string  text;             // "{op: add, inputs: [...], output: ...}"
    std::string  without_emitter;  // the text in files that were recorded when the op had no emitter
    const char * reason;           // why no kernel can be built; NULL when one can
};

neuron_manifest_text neuron_manifest_text_of(const ggml_tensor * op);

// Returns a node's op and inputs, and why no kernel can be built, if so: "mul_mat of (64,4,1,1)/f32, (64,2,1,1)/f32".
std::string neuron_describe(const ggml_tensor * op);

// Returns the line of a manifest's kernels for a node. Sets `reason` to why no kernel can be built, or NULL.
std::string neuron_manifest_line(const ggml_tensor * op, const char ** reason);

// Returns a tensor in a manifest's notation ("(4096,512,1,1)/f32"), or "absent".
std::string neuron_tensor_text(const neuron_kernels_tensor & t);

// Adds, in words, the differences between a kernel's parameters, from word `kernel_params` on, and a node's ("eps is
// 1.0e-06, not 1.0e-05").
void neuron_add_param_differences(const ggml_tensor *        op,
                                  const int32_t *            kernel_params,
                                  std::vector<std::string> & found);

// Returns a hash that distinguishes the nodes that entries of a manifest distinguish.
uint64_t neuron_fingerprint(const ggml_tensor * op);

// Returns whether kernelgen has an emitter for a node, judging by its op, types and parameters.
bool neuron_can_be_built(const ggml_tensor * op);
