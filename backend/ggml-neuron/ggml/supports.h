// Which ops a device takes: ggml's supports_op.

#pragma once

#include "ggml-backend-impl.h"

#include <string>

// Throws std::runtime_error for a weight that llama.cpp would split over devices (-sm tensor): llama.cpp has no other way to be told
// before it has a context, and takes that for a model that can't be loaded.
bool ggml_backend_neuron_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op);

// Returns what to say of a mode of llama.cpp (-sm) that splits single weights over devices.
std::string neuron_no_split(const char * mode);
