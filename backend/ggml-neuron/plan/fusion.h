// Whether a device computes groups of nodes in one launch, and the number of launches per kernel, for llama.cpp's
// test-fusion.

#pragma once

#include "select/kernel_store.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

class neuron_fusion {
  public:
    // GGML_NEURON_FUSION gives the initial state. The store's bundles are all open.
    explicit neuron_fusion(const neuron_kernel_store & kernels);

    bool is_enabled() const { return enabled; }

    void set_enabled(bool enable) { enabled = enable; }

    // Returns a kernel's counter of launches.
    std::atomic<uint64_t> * launches_of(const neuron_kernel & kernel) { return &launches.at(kernel.id()); }

    void reset();

    // Fills in the ids and the numbers of launches of the first n kernels. Returns the number of kernels.
    int get(const char ** ids, uint64_t * counts, int n) const;

  private:
    std::atomic<bool>                            enabled;
    std::map<std::string, std::atomic<uint64_t>> launches;  // by id
};
