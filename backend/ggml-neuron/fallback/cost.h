// What it costs that the CPU computes nodes whose tensors are in device memory: bytes that go to the host and back.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

class neuron_fallback_cost {
  public:
    // Bytes that one node may move before a message says so, once in a process: a KV cache, a large weight.
    static constexpr uint64_t LARGE = (uint64_t) 16 << 20;

    // Counts what a node moved.
    void add(const ggml_tensor * node, uint64_t bytes);

    // Counts that a weight was read from the device, as ggml's scheduler does for a node that the CPU computes.
    void add_weight(const ggml_tensor * weight, uint64_t bytes);

    // Counts that another tensor was read from the device, as the scheduler does for such a node, too.
    void add_read(const ggml_tensor * tensor, uint64_t bytes);

    uint64_t bytes() const;

    // Returns "nodes on the CPU moved 12.3 MiB to the host or back, at most 4.0 MiB, for MUL_MAT 'node_7'", and of what was read in the same way.
    std::string summary() const;

  private:
    // Tensors that were read.
    struct reads {
        uint64_t    total = 0;
        uint64_t    most  = 0;
        std::string name;

        void        add(const ggml_tensor * tensor, uint64_t bytes);
        std::string summary(const char * what) const;
    };

    mutable std::mutex mutex;
    uint64_t           total = 0;
    uint64_t           most  = 0;
    std::string        name;
    bool               said = false;
    reads              weights;
    bool               weight_said = false;
    reads              others;
    bool               other_said = false;
};
