// What llama.cpp asked about its weights before it placed them, by op and by what a weight has in common with the tensor that is made of
// it later: name, type and shape. A target and its draft model have names in common. Of weights that agree in all three the answers are the
// same, unless the program offers them for other ops.

#pragma once

#include "ggml.h"

// Notes an answer: whether the device takes a weight for an op.
void neuron_note_weight(const ggml_tensor * op, const ggml_tensor * weight, bool takes);

// Returns whether the device was asked to take the weight for any op, and refused.
bool neuron_refused_weight(const ggml_tensor * weight);

// Returns whether the device was asked to take the weight for any op.
bool neuron_is_offered_weight(const ggml_tensor * t);

// Returns whether a node gathers rows of a weight in host memory that llama.cpp never offered to the device: the embedding of the input
// tokens, which it keeps there and on the CPU, though its scheduler asks the device for the node.
bool neuron_is_kept_by_host(const ggml_tensor * op);

// Returns whether a tensor is a model's weight.
bool neuron_is_weight(const ggml_tensor * t);
