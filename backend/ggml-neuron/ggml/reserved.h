// Reports, before any graph is computed, the ops without kernels in the graphs that llama.cpp reserves memory for with
// -sm tensor.
//
// ggml's meta backend calls supports_op for whole nodes. It makes the parts that devices compute when it allocates
// nodes, for the first computed graph; reserving allocates no nodes. So while a context reserves memory, this code
// notes the nodes that supports_op is called for. Once the graph is complete, it allocates copies of them in a buffer
// of the meta device, which then makes the same parts.
//
// The state is per thread: llama.cpp divides a graph and computes its memory in one thread.

#pragma once

#include "ggml.h"

#include <cstddef>

// Begins noting: the program makes a context over this many cores, which reserves memory for the next graphs.
void neuron_reserved_begin(size_t n_cores);

// Ends noting: a graph is computed.
void neuron_reserved_end();

// Notes a whole node from a call of supports_op. A core will compute a part of it.
void neuron_reserved_note(const ggml_tensor * op);

// Drops the noted nodes: their tensors may be freed.
void neuron_reserved_drop();

// Reports the ops without kernels in the parts of the noted nodes, which form a whole graph, with lines of a manifest.
void neuron_reserved_say();

// Takes a part that the meta device makes from a copy. Returns false for a part of a node that is really allocated.
bool neuron_reserved_takes(const ggml_tensor * part);
