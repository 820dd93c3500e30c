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
    std::string  without_emitter;  // what it was in a file that was recorded when the op had no emitter
    const char * reason;           // why no kernel can be built; NULL when one can
};

neuron_manifest_text neuron_manifest_text_of(const ggml_tensor * op);

// Returns a node's op and inputs, and why no kernel can be built, where none can: "mul_mat of (64,4,1,1)/f32, (64,2,1,1)/f32".
std::string neuron_describe(const ggml_tensor * op);

// Returns the line of a manifest's kernels that asks for a node's kernel, and sets `reason` to why none can be built, or NULL.
std::string neuron_manifest_line(const ggml_tensor * op, const char ** reason);

// Returns a tensor as manifests have it ("(4096,512,1,1)/f32"), or "absent".
std::string neuron_tensor_text(const neuron_kernels_tensor & t);

// Adds in words where a kernel's parameters, the words that `kernel_params` begins, are not a node's ("eps is 1.0e-06, not 1.0e-05").
void neuron_add_param_differences(const ggml_tensor *        op,
                                  const int32_t *            kernel_params,
                                  std::vector<std::string> & found);

// Returns a number that tells nodes apart as entries of a manifest do.
uint64_t neuron_fingerprint(const ggml_tensor * op);

// Returns whether kernelgen has an emitter for such a node, as far as op, types and parameters tell.
bool neuron_can_be_built(const ggml_tensor * op);
