// What an execution takes on a device, by its NeuronCore: the simulator's own clock, which the machine's speed has no part in.
//
// Source: the table of the chips, tools/kernelgen/dispatch/chips.json.

#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator {

struct price {
    uint32_t version;    // of the NeuronCore
    double   waited_us;  // a launch that is waited for
    double   queued_us;  // what one adds behind others in a queue
    double   gb_per_s;   // of tensors
};

#include "prices.inc"

// Returns the price on a NeuronCore; trn1's for one that is not known.
inline const price & price_of(uint32_t version) {
    for (const price & one : PRICES) {
        if (one.version == version) {
            return one;
        }
    }
    return PRICES[0];
}

// Returns nanoseconds of an execution that reads and writes so many bytes.
inline uint64_t price_ns(const price & price, bool queued, size_t bytes) {
    const double us = queued ? price.queued_us : price.waited_us;
    return static_cast<uint64_t>(us * 1000 + static_cast<double>(bytes) / price.gb_per_s);
}

}  // namespace simulator
