// What a ggml backend of this kind has: a device, plans of graphs, and a stream of launches.

#pragma once

#include "census.h"
#include "device.h"
#include "flights.h"
#include "plan.h"

#include <atomic>

struct ggml_backend_neuron_context {
    ggml_backend_neuron_device_context * device;
    neuron_planner                       planner;
    neuron_census                        census;
    std::atomic<bool>                    computed;  // a graph
    neuron_stream                        stream{};
};
