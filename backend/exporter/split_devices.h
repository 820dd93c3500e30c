// Devices without memory over which llama.cpp splits a model's tensors (-sm tensor). What each is given to compute is recorded.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <unordered_set>
#include <vector>

// What one device is given in turn: the nodes of a part, and after each part but the last the tensor that the devices add.
struct device_step {
    ggml_cgraph *       part = nullptr;
    const ggml_tensor * sum  = nullptr;
};

// Returns `count` devices and a NULL, as llama_model_params.devices wants them. They are made once and stay.
ggml_backend_dev_t * split_devices(size_t count);

// Gives llama.cpp's graphs memory that does not exist, and has llama.cpp's meta backend cut them into the parts of each device.
class graph_splitter {
  public:
    graph_splitter() = default;

    // Cuts a graph that `sched` has assigned to its backends. Returns the steps of each device; they hold until the next call.
    // Throws std::runtime_error when nothing in the graph is for the devices.
    const std::vector<std::vector<device_step>> & split(ggml_backend_sched_t sched, ggml_cgraph * graph);

  private:
    void place(ggml_backend_sched_t sched, ggml_backend_t meta, ggml_tensor * t);

    ggml_backend_buffer_ptr           weights;
    ggml_backend_buffer_ptr           caches;
    ggml_backend_buffer_ptr           computed;
    ggml_backend_buffer_ptr           host;
    std::unordered_set<ggml_tensor *> placed;      // in this graph
    std::unordered_set<ggml_tensor *> persistent;  // weights and caches that have got their place here
    uintptr_t                         next = 0;
};

// Returns what a tensor of a device is to the graph, or NULL.
const char * role_on_device(const ggml_tensor * t);
