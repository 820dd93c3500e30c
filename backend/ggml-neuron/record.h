// Ops that were asked for and that no bundle has a kernel for: said once (GGML_NEURON_LOG) and written as a manifest
// (GGML_NEURON_RECORD).

#pragma once

#include "ggml.h"

// Notes that a node was asked for and that there is no kernel for it. Cheap when neither variable is set.
void neuron_note_missing(const ggml_tensor * op);

// Returns whether GGML_NEURON_RECORD is set.
bool neuron_recording();
