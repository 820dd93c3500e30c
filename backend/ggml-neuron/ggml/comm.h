// Reductions over devices for ggml's meta backend (llama.cpp's -sm tensor), which asks for these functions by name.

#pragma once

#include "ggml-backend-impl.h"

#include <cstddef>

// ggml_backend_comm_init: returns what reduces over these backends, or NULL when they are not all backends of NeuronCores.
void * ggml_backend_neuron_comm_init(ggml_backend_t * backends, size_t n_backends);

// ggml_backend_comm_free
void ggml_backend_neuron_comm_free(void * comm);

// ggml_backend_comm_allreduce_tensor: replaces each tensor, of the backend at the same place, by the sum of all. The sum is made on the
// host in the order of the backends, so it does not depend on which of them is late. A tensor without GGML_TENSOR_FLAG_COMPUTE, which
// nobody computed because its slice is empty, counts as zeros. Returns false where it does nothing: then the meta backend copies and adds.
//
// ggml can't be told that a reduction fails: the next graph fails then, as after a launch that failed.
bool ggml_backend_neuron_comm_allreduce_tensor(void * comm, ggml_tensor ** tensors);
