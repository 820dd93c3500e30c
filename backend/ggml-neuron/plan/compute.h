// Computes what a plan has for a node or a group: launches, transfers, copies, or the CPU.

#pragma once

#include "device/core.h"
#include "ggml.h"
#include "plan/plan.h"

// Returns what ggml is told of a status of the runtime.
enum ggml_status neuron_ggml_status(NRT_STATUS status);

// Computes what is planned; launches may be in flight when it returns. Needs the core's mutex.
enum ggml_status neuron_compute(neuron_core & core, neuron_stream & stream, const neuron_planned & planned);

// The same step by step, of what has launches: each step has one of them, and the last, whose number is that of launches, what is behind
// them. Launches that wait for other cores are launched on all of them before one core goes on.
enum ggml_status neuron_compute_step(neuron_core &          core,
                                     neuron_stream &        stream,
                                     const neuron_planned & planned,
                                     size_t                 step);
