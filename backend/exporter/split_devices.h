// Devices without memory over which llama.cpp splits a model's tensors (-sm tensor). They record the nodes that each device
// would compute.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <unordered_set>
#include <vector>

// A step of a device: the nodes of a part, and the tensor that the devices add after it (none after the last part).
struct device_step {
    ggml_cgraph *       part = nullptr;
    const ggml_tensor * sum  = nullptr;
};

// Returns `count` devices and a NULL, as llama_model_params.devices requires. They are made once and never freed.
ggml_backend_dev_t * split_devices(size_t count);

// Allocates graphs in memory that does not exist, and makes llama.cpp's meta backend split them into each device's parts.
class graph_splitter {
  public:
    graph_splitter() = default;

    // Cuts a graph that `sched` has assigned to its backends. Returns the steps of each device; they hold until the next call.
    // Throws std::runtime_error if no node of the graph is for the devices.
    const std::vector<std::vector<device_step>> & split(ggml_backend_sched_t sched, ggml_cgraph * graph);

  private:
    void place(ggml_backend_sched_t sched, ggml_backend_t meta, ggml_tensor * t);

    ggml_backend_buffer_ptr           weights;
    ggml_backend_buffer_ptr           caches;
    ggml_backend_buffer_ptr           computed;
    ggml_backend_buffer_ptr           host;
    std::unordered_set<ggml_tensor *> placed;      // in this graph
    std::unordered_set<ggml_tensor *> persistent;  // weights and caches that have an address
    uintptr_t                         next = 0;
};

// Returns the role of a device's tensor in the graph, or NULL.
const char * role_on_device(const ggml_tensor * t);
