// Numbers that kernels take at run time: parameters of a node that its kernel has as an additional input, so that the
// kernel computes the node for any values.
//
// The kernel's key has 0 in their place, and a word that ggml leaves 0 marks them (tools/kernelgen/ggml/ops.py, `ANY`).
// In a group, either all nodes that may have such numbers have them, or no node has them.

#pragma once

#include "ggml.h"
#include "select/key_nodes.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// The word of the parameters that marks the open ones, with a bit for each.
constexpr int NEURON_OPEN_WORD = 15;

// A node's parameters in a key.
using neuron_params = std::array<uint64_t, nk::PARAM_WORDS>;

// Returns whether kernels for any numbers of a node are possible.
bool neuron_has_numbers(const ggml_tensor * node);

// Returns how many numbers a node passes to such a kernel: the first words of its parameters.
size_t neuron_count_numbers(const ggml_tensor * node);

// Returns a node's parameters: ggml's own, and the parameters in the key of a kernel for any numbers.
neuron_params neuron_params_of(const ggml_tensor * node);
neuron_params neuron_open_params_of(const ggml_tensor * node);

// Changes the parameters of a key's node to the parameters of a kernel for any numbers, if such a kernel is possible.
void neuron_open(const neuron_key_node & node, neuron_params & params);

// Returns whether the kernel of a key's node is for any numbers.
bool neuron_is_open(const neuron_key_node & node);

// Appends a node's numbers.
void neuron_add_numbers(const ggml_tensor * node, std::vector<float> & numbers);
