// Ops without a kernel in any bundle: a message for each (GGML_NEURON_LOG), and a manifest with them that can be built
// (GGML_NEURON_RECORD).

#pragma once

#include "ggml.h"

#include <string>

// Notes a requested node without a kernel. Cheap when neither variable is set.
void neuron_note_missing(const ggml_tensor * op);

// Notes that the CPU computed a node without a kernel. Cheap when ops are not recorded.
void neuron_note_executed(const ggml_tensor * op);

// Returns whether GGML_NEURON_RECORD is set.
bool neuron_recording();

// Sets the target of the manifest's kernels ("trn1") and its physical cores per logical core. "", or a target that
// kernelgen lacks, becomes trn1.
void neuron_record_target(const std::string & target, uint32_t lnc);

// Writes new notes to the file, and waits a few seconds while other processes write. Notes are also written about every
// second, without waiting, and when the process exits.
void neuron_record_flush();
