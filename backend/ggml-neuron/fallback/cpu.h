// Computes single nodes on the CPU that a NeuronCore can't compute: see neuron_compute_on_cpu.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <functional>

// Access to the contents of tensors outside host memory. `address` is tensor->data.
struct neuron_host_access {
    std::function<bool(const ggml_tensor * tensor)> is_device;  // false: data is a host pointer
    std::function<bool(const ggml_tensor * owner, const void * address, void * data, size_t size)>       read;
    std::function<bool(const ggml_tensor * owner, const void * address, const void * data, size_t size)> write;
};

// Returns whether the program has ggml's CPU backend.
bool neuron_has_cpu();

// Returns whether ggml's CPU backend computes an op.
bool neuron_cpu_computes(const ggml_tensor * op);

// Computes one node on the CPU: copies its device tensors to the host and the result back. This is slow. It serves
// nodes that would otherwise end the program: a write to device memory (the KV cache) without a kernel, or a kernel
// that fails to load. Threads may call it concurrently for different cores; it computes one node at a time.
enum ggml_status neuron_compute_on_cpu(ggml_tensor * node, const neuron_host_access & access);
