// Computing single nodes on the CPU, for what a NeuronCore can't: see neuron_compute_on_cpu.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <functional>

// How to get at the contents of tensors that are not in host memory. `address` is what tensor->data says.
struct neuron_host_access {
    std::function<bool(const ggml_tensor * tensor)> is_device;  // false: data is a host pointer
    std::function<bool(const ggml_tensor * owner, const void * address, void * data, size_t size)>       read;
    std::function<bool(const ggml_tensor * owner, const void * address, const void * data, size_t size)> write;
};

// Returns whether the program has ggml's CPU backend.
bool neuron_has_cpu();

// Computes one node on the CPU: its device tensors are copied to the host and the result back. Slow, and meant for what
// would otherwise end the program: a node that writes to memory of the device (the KV cache) without a kernel for it, or
// a kernel that turns out not to load. Threads may call it at once, for different cores; it computes one node after another.
enum ggml_status neuron_compute_on_cpu(ggml_tensor * node, const neuron_host_access & access);
