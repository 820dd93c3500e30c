// The ops that a device supports: ggml's supports_op.

#pragma once

#include "ggml-backend-impl.h"

bool ggml_backend_neuron_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op);
