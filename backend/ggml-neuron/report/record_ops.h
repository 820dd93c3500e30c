// Ops that were asked for and that no bundle has a kernel for: a message for each (GGML_NEURON_LOG), and written as a manifest
// that can be built (GGML_NEURON_RECORD).

#pragma once

#include "ggml.h"

#include <string>

// Notes that a node was asked for and that there is no kernel for it. Cheap when neither variable is set.
void neuron_note_missing(const ggml_tensor * op);

// Notes that the CPU computed a node that has no kernel. Cheap when ops are not recorded.
void neuron_note_executed(const ggml_tensor * op);

// Returns whether GGML_NEURON_RECORD is set.
bool neuron_recording();

// Says what the manifest's kernels are to be compiled for ("trn1"); "" or what kernelgen does not know is trn1.
void neuron_record_target(const std::string & target);

// Writes what was noted and is not yet in the file, and waits a few seconds while other processes write. Happens by itself,
// without waiting, about every second, and when the process exits.
void neuron_record_flush();
