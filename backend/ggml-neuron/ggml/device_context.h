// State that the backend's files share: its devices and their kernels.

#pragma once

#include "device/core.h"
#include "ggml-backend-impl.h"
#include "nrt.h"
#include "plan/fusion.h"
#include "select/kernel_store.h"
#include "weights/layouts.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

// Where tensors are. Chosen once, for all devices.
enum class neuron_buffers {
    DEVICE,  // in device memory
    HOST,    // in host memory, and copied for each op
};

// A buffer type of device memory.
struct neuron_buffer_type {
    neuron_buffer_type_context context;
    ggml_backend_buffer_type   buft{};
};

struct ggml_backend_neuron_device_context {
    std::string                  name;
    std::string                  description;
    std::unique_ptr<neuron_core> core;
    neuron_fusion                fusion;

    // By layout: the first is for all tensors, the others are for weights.
    neuron_buffer_type buffer_types[NEURON_KERNELS_LAST_FORM + 1];

    // For tensors in host memory.
    std::string              host_name;
    ggml_backend_buffer_type host_buffer_type{};

    // Buffer types for weights that kernels take, then NULL.
    std::vector<ggml_backend_buffer_type_t> extra_bufts;

    // Whether the program has made a backend of the device.
    std::atomic<bool> has_backend{ false };

    // The number of contexts that compute parts of nodes on the device for ggml's meta backend (-sm tensor).
    std::atomic<int> n_comms{ 0 };

    explicit ggml_backend_neuron_device_context(const neuron_kernel_store & kernels) : fusion(kernels) {}
};

struct ggml_backend_neuron_reg_context {
    const neuron_nrt *                                               nrt = nullptr;
    neuron_kernel_store                                              kernels;
    neuron_buffers                                                   buffers = neuron_buffers::HOST;
    std::vector<std::unique_ptr<ggml_backend_neuron_device_context>> contexts;
    std::vector<ggml_backend_device>                                 devices;
};

// Returns the shared state. The first call opens libnrt and the kernels.
ggml_backend_neuron_reg_context & ggml_backend_neuron_shared();
