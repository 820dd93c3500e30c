// llama.cpp's calls of supports_op for its weights before it places them. They are kept by op and by the properties
// that a weight shares with its later tensor: name, type and shape. A target and its draft model may share names.
// Weights with the same three properties get the same answers, unless the program offers them for other ops.

#pragma once

#include "ggml.h"

// Notes an answer: whether the device takes a weight for an op.
void neuron_note_weight(const ggml_tensor * op, const ggml_tensor * weight, bool takes);

// Returns whether the program offered the weight for any op and the device refused it.
bool neuron_refused_weight(const ggml_tensor * weight);

// Returns whether the program offered the weight for any op.
bool neuron_is_offered_weight(const ggml_tensor * t);

// Returns whether a node gathers rows of a weight in host memory that llama.cpp never offered to the device: the
// embedding of the input tokens. llama.cpp keeps it on the CPU, though its scheduler calls supports_op for the node.
bool neuron_is_kept_by_host(const ggml_tensor * op);

// Returns whether a tensor is a model's weight.
bool neuron_is_weight(const ggml_tensor * t);
