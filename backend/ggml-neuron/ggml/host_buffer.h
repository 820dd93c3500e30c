// Buffers in host memory.

#pragma once

#include "device/core.h"
#include "ggml-backend.h"

// The type of buffers that a program keeps inputs and outputs in, where tensors are in device memory. The host tensors of
// libnrt (NRT_TENSOR_PLACEMENT_HOST) are deprecated and of 4 MB at most, and AWS documents no other memory that a device reads faster: this
// is plain, page-aligned memory.
ggml_backend_buffer_type_t neuron_host_buffer_type(ggml_backend_dev_t dev);

// A device's own type where tensors are in host memory: buffers that know of writes to them. `name` stays with the caller.
ggml_backend_buffer_type neuron_kept_buffer_type(ggml_backend_dev_t dev, const char * name);

// Returns such a buffer for memory that it does not own.
ggml_backend_buffer_t neuron_kept_buffer_from_ptr(ggml_backend_buffer_type_t buft, void * data, size_t size);

// locked. Sets `operand` to where a core has a copy of a tensor that is in host memory, which it gets and keeps when there is none yet.
// Returns false when it keeps none: only of weights (GGML_BACKEND_BUFFER_USAGE_WEIGHTS) that no op is known to write to, in buffers of
// neuron_kept_buffer_type, and as long as memory is left. Copies go when the buffer is freed, or written to by ggml's functions.
bool neuron_locate_kept(neuron_core &           core,
                        const ggml_tensor *     t,
                        const neuron_programs & programs,
                        neuron_operand &        operand);

// Has no core keep a copy of the tensors that an op writes to. To be called with no core locked, before the op is computed.
void neuron_note_writes(const ggml_tensor * op);
