// Host memory for what goes to a NeuronCore or comes from it: ggml's host buffer type.

#pragma once

#include "ggml-backend.h"

// Returns the type of buffers that the CPU computes with, too: ordinary memory that begins on a page, as DMA engines like it.
ggml_backend_buffer_type_t neuron_host_buffer_type(ggml_backend_dev_t dev);
