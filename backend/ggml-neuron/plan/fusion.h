// Whether a device computes groups of nodes in one launch, and how often it did, by kernel: what llama.cpp's test-fusion asks for.

#pragma once

#include "select/kernel_store.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

class neuron_fusion {
  public:
    // GGML_NEURON_FUSION says whether groups are computed at first. The kernels are all open.
    explicit neuron_fusion(const neuron_kernel_store & kernels);

    bool is_enabled() const { return enabled; }

    void set_enabled(bool enable) { enabled = enable; }

    // Returns where a kernel's launches are counted.
    std::atomic<uint64_t> * launches_of(const neuron_kernel & kernel) { return &launches.at(kernel.id()); }

    void reset();

    // Fills in the first n kernels' ids and numbers of launches, and returns how many kernels there are.
    int get(const char ** ids, uint64_t * counts, int n) const;

  private:
    std::atomic<bool>                            enabled;
    std::map<std::string, std::atomic<uint64_t>> launches;  // by id
};
