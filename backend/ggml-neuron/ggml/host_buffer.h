// Buffers in host memory.

#pragma once

#include "device/core.h"
#include "ggml-backend.h"

// Returns the type of host buffers for inputs and outputs when tensors are in device memory. libnrt's host tensors
// (NRT_TENSOR_PLACEMENT_HOST) are deprecated and limited to 4 MB, and AWS documents no other host memory that a device
// reads faster. So this is plain, page-aligned memory.
ggml_backend_buffer_type_t neuron_host_buffer_type(ggml_backend_dev_t dev);

// Returns a device's own type for tensors in host memory: its buffers track writes. The caller keeps `name` alive.
ggml_backend_buffer_type neuron_kept_buffer_type(ggml_backend_dev_t dev, const char * name);

// Returns such a buffer for memory that it does not own.
ggml_backend_buffer_t neuron_kept_buffer_from_ptr(ggml_backend_buffer_type_t buft, void * data, size_t size);

// locked. Sets `operand` to a core's copy of a tensor in host memory, and makes the copy on first use. Returns false
// when the core keeps no copy: it keeps only weights (GGML_BACKEND_BUFFER_USAGE_WEIGHTS) in buffers of
// neuron_kept_buffer_type that no op is known to write to, while memory lasts. Freeing the buffer, or writing to it
// with ggml's functions, drops the copies.
bool neuron_locate_kept(neuron_core &           core,
                        const ggml_tensor *     t,
                        const neuron_programs & programs,
                        neuron_operand &        operand);

// Marks the tensors that an op writes to: no core keeps copies of them. Call it before the op is computed, with no core
// locked.
void neuron_note_writes(const ggml_tensor * op);
