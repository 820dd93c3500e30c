// The context of a ggml backend: a device, plans of graphs, and a stream of launches.

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
    std::atomic<bool>                    computed;         // a graph was computed
    neuron_stream                        stream{};
    neuron_chain *                       chain = nullptr;  // belongs to the comm
};

// Makes a backend for a device.
ggml_backend_t ggml_backend_neuron_device_init_backend(ggml_backend_dev_t dev, const char * params);

// Computes a graph, or queues it. A graph with an output is complete on return.
enum ggml_status ggml_backend_neuron_compute(ggml_backend_neuron_context & ctx, ggml_cgraph * cgraph);
