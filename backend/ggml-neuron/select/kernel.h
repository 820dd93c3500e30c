// A kernel of a bundle that is open.

#pragma once

#include "neuron_kernels.h"

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

// A bundle that is open for as long as the process lives.
struct neuron_bundle {
    neuron_kernels * handle = nullptr;
    std::string      origin;        // the path of the pack or tree, or "embedded NAME_TARGET"
    uint32_t         position = 0;  // among all bundles

    // What is in it regardless of shapes: the first words of keys, and hashes of these and the input types.
    std::unordered_set<uint64_t> ops;
    std::unordered_set<uint64_t> signatures;

    std::vector<int32_t> graphs;  // its graph kernels

    // What kernels ask of weights in layouts: hashes of ops and tensors, and the layouts, as bits.
    std::unordered_set<uint64_t> weights;
    uint32_t                     layouts = 0;

    ~neuron_bundle() { neuron_kernels_close(handle); }
};

// One kernel of one bundle.
struct neuron_kernel {
    const neuron_bundle * bundle = nullptr;
    int32_t               number = NEURON_KERNELS_NOT_FOUND;
    int                   alias  = NEURON_KERNELS_NO_ALIAS;  // the source that it writes its result to

    explicit operator bool() const { return bundle != nullptr; }

    const char * id() const { return neuron_kernels_id(bundle->handle, number); }

    // Tells the NEFF from the others of all bundles.
    uint64_t neff_number() const {
        return (uint64_t) bundle->position << 32 | (uint32_t) neuron_kernels_neff_index(bundle->handle, number);
    }
};
