// A ggml backend that runs ahead-of-time compiled kernels on the NeuronCores of AWS Trainium and Inferentia.
//
// Programs that load backends by themselves (GGML_BACKEND_PATH, or llama.cpp's backend folder) need none of these
// functions. docs/reference/environment.md describes the environment variables that configure the backend.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct neuron_kernels_table;

// Returns the registration: one device per NeuronCore, none on a machine without libnrt.
GGML_BACKEND_API ggml_backend_reg_t ggml_backend_neuron_reg(void);

// Returns a backend on a NeuronCore, counted from 0, or NULL when the machine has fewer.
GGML_BACKEND_API ggml_backend_t ggml_backend_neuron_init(size_t core);

GGML_BACKEND_API bool ggml_backend_is_neuron(ggml_backend_t backend);

// Adds a bundle that is linked into the program. The backend searches bundles in the order of their registration, after
// the packs of GGML_NEURON_KERNEL_DIR. Call this before the registration is first used. Bundles of GGML_NEURON_EMBED
// (ggml-neuron.cmake) need no call.
GGML_BACKEND_API void ggml_backend_neuron_register_bundle(const struct neuron_kernels_table * table);

#ifdef __cplusplus
}
#endif
