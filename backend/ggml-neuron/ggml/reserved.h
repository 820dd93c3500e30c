// What cores lack of the graphs that llama.cpp reserves memory for with -sm tensor, named before any graph is computed.
//
// ggml's meta backend asks about whole nodes, and makes the parts of them that devices compute when it gives nodes memory: for the
// first graph that is computed. Reserving has none of that. So while a context reserves memory, the nodes that devices are asked about
// are noted, and once the graph is whole, copies of them are given a buffer of the meta device, which makes their parts as it will then.
//
// The state is of a thread: llama.cpp divides a graph and asks how much memory it takes in one.

#pragma once

#include "ggml.h"

#include <cstddef>

// A context over as many cores is made, whose next graphs memory is reserved for.
void neuron_reserved_begin(size_t n_cores);

// A graph is computed: nothing is noted any more.
void neuron_reserved_end();

// Notes a whole node that a device was asked about, whose parts a core is to compute.
void neuron_reserved_note(const ggml_tensor * op);

// Drops what was noted: the tensors may be gone.
void neuron_reserved_drop();

// The nodes that were noted are all of a graph: names what their parts lack, with lines of a manifest.
void neuron_reserved_say();

// Takes a part that the meta device makes of a copy. Returns false when it is of a node that will have memory.
bool neuron_reserved_takes(const ggml_tensor * part);
