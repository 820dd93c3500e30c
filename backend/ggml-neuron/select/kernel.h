// A kernel of an open bundle.

#pragma once

#include "neuron_kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

// Core memory that programs take for themselves, in bytes.
struct neuron_program_memory {
    size_t bytes      = 0;  // code and rings; 0 when the bundle states none
    size_t scratchpad = 0;  // shared by all programs of a core
};

// Totals of the programs of all bundles. Equal NEFFs of a bundle count once.
struct neuron_programs {
    size_t                n          = 0;
    size_t                n_unstated = 0;  // programs whose bundle states no figures
    neuron_program_memory memory;          // of the others: sum of code and rings, largest scratchpad
};

// The least memory of a program besides its tensors. Source: AWS Neuron, "Neuron device memory" of the troubleshooting
// guide, the figure for a small NEFF.
constexpr size_t NEURON_PROGRAM_MEMORY = (size_t) 250 << 10;

// A bundle that stays open for the life of the process.
struct neuron_bundle {
    neuron_kernels * handle = nullptr;
    std::string      origin;        // the path of the pack, or "embedded NAME_TARGET"
    uint32_t         position = 0;  // among all bundles

    // The bundle's ops regardless of shapes: the first words of keys, and hashes of these with the input types.
    std::unordered_set<uint64_t> ops;
    std::unordered_set<uint64_t> signatures;

    std::vector<int32_t> graphs;  // the numbers of its graph kernels

    // The weights in layouts that kernels take: hashes of ops and tensors, and the layouts as bits.
    std::unordered_set<uint64_t> weights;
    uint32_t                     layouts = 0;

    neuron_programs programs;

    ~neuron_bundle() { neuron_kernels_close(handle); }
};

// One kernel of one bundle.
struct neuron_kernel {
    const neuron_bundle * bundle = nullptr;
    int32_t               number = NEURON_KERNELS_NOT_FOUND;
    int                   alias  = NEURON_KERNELS_NO_ALIAS;  // the source whose memory receives the result

    explicit operator bool() const { return bundle != nullptr; }

    // Returns its program's figures from the bundle.
    neuron_program_memory memory() const {
        const uint64_t * said = neuron_kernels_neff_memory(bundle->handle, number);
        if (!said) {
            return {};
        }
        const uint64_t bytes = said[NEURON_KERNELS_MEMORY_CODE] + said[NEURON_KERNELS_MEMORY_RINGS];
        return { std::max<size_t>(bytes, NEURON_PROGRAM_MEMORY), (size_t) said[NEURON_KERNELS_MEMORY_SCRATCHPAD] };
    }

    const char * id() const { return neuron_kernels_id(bundle->handle, number); }

    // Returns a number that identifies the NEFF among all bundles.
    uint64_t neff_number() const {
        return (uint64_t) bundle->position << 32 | (uint32_t) neuron_kernels_neff_index(bundle->handle, number);
    }
};
