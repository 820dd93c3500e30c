// Computes the plan of a node or a group: launches, transfers, copies, or the CPU.

#pragma once

#include "device/core.h"
#include "ggml.h"
#include "plan/plan.h"

// Returns ggml's status for a status of the runtime.
enum ggml_status neuron_ggml_status(NRT_STATUS status);

// Computes a planned node or group; launches may be in flight when it returns. Needs the core's mutex.
enum ggml_status neuron_compute(neuron_core & core, neuron_stream & stream, const neuron_planned & planned);

// Computes one step of a planned node or group that has launches. Step i < n, the number of launches, is launch i; step
// n is the work behind them. Launches that wait for other cores are launched on all of them before one core continues.
enum ggml_status neuron_compute_step(neuron_core &          core,
                                     neuron_stream &        stream,
                                     const neuron_planned & planned,
                                     size_t                 step);
