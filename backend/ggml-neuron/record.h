// Ops that were asked for and that no bundle has a kernel for: said once each (GGML_NEURON_LOG), and written as a manifest
// that can be built (GGML_NEURON_RECORD).

#pragma once

#include "ggml.h"
#include "neuron_kernels.h"

#include <cstdint>
#include <string>
#include <vector>

// Notes that a node was asked for and that there is no kernel for it. Cheap when neither variable is set.
void neuron_note_missing(const ggml_tensor * op);

// Notes that the CPU computed a node that has no kernel. Cheap when ops are not recorded.
void neuron_note_executed(const ggml_tensor * op);

// Returns a node's op and inputs, and why no kernel can be built, where none can: "mul_mat of (64,4,1,1)/f32, (64,2,1,1)/f32".
std::string neuron_describe(const ggml_tensor * op);

// Returns the line of a manifest's kernels that asks for a node's kernel, and sets `reason` to why none can be built, or NULL.
std::string neuron_manifest_line(const ggml_tensor * op, const char ** reason);

// Returns a tensor as manifests have it ("(4096,512,1,1)/f32"), or "absent".
std::string neuron_tensor_text(const neuron_kernels_tensor & t);

// Adds in words where a kernel's parameters, the words that `held` begins, are not a node's ("eps is 1.0e-06, not 1.0e-05").
void neuron_add_param_differences(const ggml_tensor * op, const int32_t * held, std::vector<std::string> & found);

// Returns a number that tells nodes apart as entries of a manifest do.
uint64_t neuron_fingerprint(const ggml_tensor * op);

// Returns whether kernelgen has an emitter for such a node, as far as op, types and parameters tell.
bool neuron_can_be_built(const ggml_tensor * op);

// Returns whether GGML_NEURON_RECORD is set.
bool neuron_recording();

// Says what the manifest's kernels are to be compiled for ("trn1"); "" or what kernelgen does not know is trn1.
void neuron_record_target(const std::string & target);

// Writes what was noted and is not yet in the file, and waits a few seconds while other processes write. Happens by itself,
// without waiting, about every second, and when the process exits.
void neuron_record_flush();
