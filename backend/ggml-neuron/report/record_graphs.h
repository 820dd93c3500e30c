// Records the graphs that the device computes, each once, in the file that GGML_NEURON_RECORD names
// (docs/reference/graphs.md). `kernelgen model` makes a manifest of it.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

// Returns whether GGML_NEURON_RECORD is set. The device then takes every op that the CPU computes.
bool neuron_recording();

// Sets the target of the machine ("trn1"), and its physical cores per logical core.
void neuron_record_target(const std::string & target, uint32_t lnc);

// Notes a node for which supports_op is called, if it belongs to llama.cpp's probe of a sampler.
void neuron_record_probe(const ggml_tensor * op);

// Returns a node as the line of a graph without others, for GGML_NEURON_LOG=2.
std::string neuron_node_line(const ggml_tensor * op);

// Writes a computed graph, unless an equal one was written.
void neuron_record_graph(ggml_cgraph * cgraph);

// Writes the graphs of devices that split tensors, with sums between their parts: one graph for equal devices. `graphs`
// is in the order of the devices.
void neuron_record_split_graphs(const std::vector<ggml_cgraph *> & graphs);

// Writes the graphs that were pending while another process wrote.
void neuron_record_flush();
