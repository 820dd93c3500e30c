// Graphs that the device was given to compute, each once, in the file that GGML_NEURON_RECORD_GRAPHS names, as docs/reference/graphs.md
// describes them: `kernelgen model` makes graph kernels of them.

#pragma once

#include "ggml.h"

#include <vector>

// Returns whether GGML_NEURON_RECORD_GRAPHS is set.
bool neuron_recording_graphs();

// Writes a graph that is computed, unless an equal one was written. The pieces in which a program looks at every node are none.
void neuron_record_graph(ggml_cgraph * cgraph);

// Writes the graphs of devices over which tensors are split, with sums between their parts: one for equal devices. They are in the order of the
// devices.
void neuron_record_split_graphs(const std::vector<ggml_cgraph *> & graphs);

// Writes what could not be written while another process wrote.
void neuron_record_graphs_flush();
