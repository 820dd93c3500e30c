// Numbers that kernels are given at run time: parameters of a node that its kernel has as one more input, so that it is for any of them.
//
// In its key they are 0, and a word that ggml leaves 0 says which they are (tools/kernelgen/ggml/ops.py, `ANY`). Of a group all nodes that
// may have such numbers have them, or none has.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// The word of parameters that says which others are open, by a bit for each.
constexpr int NEURON_OPEN_WORD = 15;

// The parameters of a node as a key has them.
using neuron_params = std::array<uint64_t, nk::PARAM_WORDS>;

// Returns whether there may be kernels for any numbers of a node.
bool neuron_has_numbers(const ggml_tensor * node);

// Returns how many numbers a node gives such a kernel: words of its parameters from the first on.
size_t neuron_count_numbers(const ggml_tensor * node);

// Returns a node's parameters as ggml has them, and as they are in the key of a kernel for any numbers.
neuron_params neuron_params_of(const ggml_tensor * node);
neuron_params neuron_open_params_of(const ggml_tensor * node);

// Makes the parameters of a node in a key those of a kernel for any numbers, if there may be one.
void neuron_open(const neuron_key_node & node, neuron_params & params);

// Returns whether the kernel of a key's node is for any numbers.
bool neuron_is_open(const neuron_key_node & node);

// Adds a node's numbers.
void neuron_add_numbers(const ggml_tensor * node, std::vector<float> & numbers);
