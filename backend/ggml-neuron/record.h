// Ops that were asked for and that no bundle has a kernel for: said once each (GGML_NEURON_LOG), and written as a manifest
// that can be built (GGML_NEURON_RECORD).

#pragma once

#include "ggml.h"

#include <string>

// Notes that a node was asked for and that there is no kernel for it. Cheap when neither variable is set.
void neuron_note_missing(const ggml_tensor * op);

// Notes that the CPU computed a node that has no kernel. Cheap when ops are not recorded.
void neuron_note_executed(const ggml_tensor * op);

// Returns a node's op and inputs, and why no kernel can be built, where none can: "mul_mat of (64,4,1,1)/f32, (64,2,1,1)/f32".
std::string neuron_describe(const ggml_tensor * op);

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
