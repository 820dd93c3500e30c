// Reductions over devices for ggml's meta backend (llama.cpp's -sm tensor), which looks these functions up by name.

#pragma once

#include "ggml-backend-impl.h"

#include <cstddef>

// ggml_backend_comm_init: returns a comm for reductions over these backends, or NULL unless all are backends of
// NeuronCores.
void * ggml_backend_neuron_comm_init(ggml_backend_t * backends, size_t n_backends);

// ggml_backend_comm_free
void ggml_backend_neuron_comm_free(void * comm);

// ggml_backend_comm_allreduce_tensor: replaces each tensor, one per backend, by the sum of all. The host adds in the
// order of the backends, so timing does not change the sum. A tensor without GGML_TENSOR_FLAG_COMPUTE, which was not
// computed because its slice is empty, counts as zeros. Returns false when it does nothing: the meta backend then
// copies and adds.
//
// ggml takes no status here: after a failed reduction the next graph fails, as after a failed launch.
bool ggml_backend_neuron_comm_allreduce_tensor(void * comm, ggml_tensor ** tensors);
