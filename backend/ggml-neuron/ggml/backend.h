// What a ggml backend of this kind has: a device, plans of graphs, and a stream of launches.

#pragma once

#include "device/launch_queue.h"
#include "ggml-backend-impl.h"
#include "ggml/device_context.h"
#include "plan/plan.h"
#include "report/statistics.h"

#include <atomic>

class neuron_chain;

struct ggml_backend_neuron_context {
    ggml_backend_neuron_device_context * device;
    neuron_planner                       planner;
    neuron_statistics                    statistics;
    std::atomic<bool>                    computed;         // a graph
    neuron_stream                        stream{};
    neuron_chain *                       chain = nullptr;  // of the comm that has it
};

// What the device makes backends with.
ggml_backend_t ggml_backend_neuron_device_init_backend(ggml_backend_dev_t dev, const char * params);

// Computes a graph, or has it computed: one with an output is waited for.
enum ggml_status ggml_backend_neuron_compute(ggml_backend_neuron_context & ctx, ggml_cgraph * cgraph);
