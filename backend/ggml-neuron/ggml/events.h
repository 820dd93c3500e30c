// ggml's interface for a backend with launches in flight: waiting, asynchronous writes, reads and copies, and events.

#pragma once

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "ggml/backend.h"

#include <cstddef>

// Returns whether a graph may still be in flight when graph_compute returns.
bool ggml_backend_neuron_is_async(const ggml_backend_neuron_device_context * device);

void ggml_backend_neuron_synchronize(ggml_backend_t backend);

// These wait only for the launches that use the tensor's memory; the data has been copied when they return.
void ggml_backend_neuron_set_tensor_async(ggml_backend_t backend,
                                          ggml_tensor *  tensor,
                                          const void *   data,
                                          size_t         offset,
                                          size_t         size);
void ggml_backend_neuron_get_tensor_async(ggml_backend_t      backend,
                                          const ggml_tensor * tensor,
                                          void *              data,
                                          size_t              offset,
                                          size_t              size);

// Copies from a NeuronCore, or from host memory, to a NeuronCore.
bool ggml_backend_neuron_cpy_tensor_async(ggml_backend_t      backend_src,
                                          ggml_backend_t      backend_dst,
                                          const ggml_tensor * src,
                                          ggml_tensor *       dst);

void ggml_backend_neuron_event_record(ggml_backend_t backend, ggml_backend_event_t event);
void ggml_backend_neuron_event_wait(ggml_backend_t backend, ggml_backend_event_t event);

// A device's functions.
ggml_backend_event_t ggml_backend_neuron_device_event_new(ggml_backend_dev_t dev);
void                 ggml_backend_neuron_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event);
void                 ggml_backend_neuron_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event);
