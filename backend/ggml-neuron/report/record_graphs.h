// Records the graphs that the device computes, each once, in the file that GGML_NEURON_RECORD_GRAPHS names
// (docs/reference/graphs.md). `kernelgen model` makes graph kernels from them.

#pragma once

#include "ggml.h"

#include <vector>

// Returns whether GGML_NEURON_RECORD_GRAPHS is set.
bool neuron_recording_graphs();

// Writes a computed graph, unless an equal one was written. Skips the pieces of a graph whose program examines every
// node.
void neuron_record_graph(ggml_cgraph * cgraph);

// Writes the graphs of devices that split tensors, with sums between their parts: one graph for equal devices. `graphs`
// is in the order of the devices.
void neuron_record_split_graphs(const std::vector<ggml_cgraph *> & graphs);

// Writes the graphs that were pending while another process wrote.
void neuron_record_graphs_flush();
