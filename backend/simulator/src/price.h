// The time of an execution on a device, by NeuronCore. The simulator's own clock adds these times; the machine's speed does not
// matter.
//
// Source: the table of the chips, tools/kernelgen/dispatch/chips.json.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace simulator {

// The time that an execution with collectives waits for its ranks.
struct barrier_price {
    uint32_t ranks;  // 0: end of the table
    double   us;
};

struct price {
    uint32_t      version;        // of the NeuronCore
    double        waited_us;      // a launch that the host waits for
    double        queued_us;      // a launch behind others in a queue
    double        gb_per_s;       // of tensors
    double        all_reduce_us;  // each small collective of an execution
    barrier_price barriers[8];    // by ranks
};

#include "prices.inc"

// Returns the price for a NeuronCore; trn1's for an unknown one.
inline const price & price_of(uint32_t version) {
    for (const price & one : PRICES) {
        if (one.version == version) {
            return one;
        }
    }
    return PRICES[0];
}

// Returns microseconds of a barrier. Between two rows of the table the time is linear in the logarithm of the number of
// ranks; outside of the table it is the nearest row's.
inline double barrier_us(const price & price, uint32_t ranks) {
    const barrier_price * before = price.barriers;
    for (const barrier_price & next : price.barriers) {
        if (next.ranks == 0 || ranks <= before->ranks) {
            break;
        }
        if (ranks <= next.ranks) {
            const double part = std::log(double(ranks) / before->ranks) / std::log(double(next.ranks) / before->ranks);
            return before->us + (next.us - before->us) * part;
        }
        before = &next;
    }
    return before->us;
}

// Returns microseconds that the collectives of an execution take. Executions in a queue hide the barrier.
inline double collectives_us(const price & price, bool queued, uint32_t ranks, uint32_t collectives) {
    return (queued ? 0 : barrier_us(price, ranks)) + price.all_reduce_us * collectives;
}

// Returns nanoseconds of an execution that reads and writes this many bytes.
inline uint64_t price_ns(const price & price, bool queued, size_t bytes) {
    const double us = queued ? price.queued_us : price.waited_us;
    return static_cast<uint64_t>(us * 1000 + static_cast<double>(bytes) / price.gb_per_s);
}

}  // namespace simulator
