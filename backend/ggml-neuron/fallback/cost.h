// The cost of computing nodes on the CPU whose tensors are in device memory: bytes moved to the host and back.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

class neuron_fallback_cost {
  public:
    // The most bytes of one node without a message, which a process prints once. Larger: a KV cache, a large weight.
    static constexpr uint64_t LARGE = (uint64_t) 16 << 20;

    // Counts the bytes that a node moved.
    void add(const ggml_tensor * node, uint64_t bytes);

    // Counts a weight that was read from the device, as ggml's scheduler does for a node on the CPU.
    void add_weight(const ggml_tensor * weight, uint64_t bytes);

    // Counts another tensor that was read from the device for a node on the CPU.
    void add_read(const ggml_tensor * tensor, uint64_t bytes);

    uint64_t bytes() const;

    // Returns "nodes on the CPU moved 12.3 MiB to the host or back, at most 4.0 MiB, for MUL_MAT 'node_7'", and the
    // same for reads.
    std::string summary() const;

  private:
    // Read tensors.
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
