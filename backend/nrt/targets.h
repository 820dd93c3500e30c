#pragma once

// The values of neuronx-cc's --target, for machines and for bundles of kernels.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "targets.inc"

// Returns the longest target that an architecture's name begins with ("trn1n" for "trn1n.32xlarge"), or "".
inline std::string neuron_target_of(const std::string & architecture) {
    std::string found;
    for (const neuron_target & target : NEURON_TARGETS) {
        const std::string name = target.name;
        if (architecture.rfind(name, 0) == 0 && name.size() > found.size()) {
            found = name;
        }
    }
    return found;
}

// Returns the target of machines of a family (such as NRT_INSTANCE_TRN1 in AWS's nrt.h), or "" for an unknown family.
inline std::string neuron_target_of_family(uint32_t family) {
    for (const neuron_target & target : NEURON_TARGETS) {
        if (std::find(target.families.begin(), target.families.end(), family) != target.families.end()) {
            return target.name;
        }
    }
    return "";
}

// Returns the target of a name, or NULL.
inline const neuron_target * neuron_find_target(const std::string & name) {
    const auto * target = std::find_if(std::begin(NEURON_TARGETS), std::end(NEURON_TARGETS),
                                       [&](const neuron_target & known) { return name == known.name; });
    return target == std::end(NEURON_TARGETS) ? nullptr : target;
}

inline bool neuron_is_target(const std::string & name) {
    return neuron_find_target(name) != nullptr;
}

// Returns why the cores from number `first` of a machine on can't compute one program; "" if they can, or the machine is
// unknown.
inline std::string neuron_rank_error(const std::string & machine, uint32_t n_ranks, uint32_t first) {
    const neuron_target * target = neuron_find_target(machine);
    if (target && std::find(target->ranks.begin(), target->ranks.end(), n_ranks) == target->ranks.end()) {
        std::string counts;
        for (const uint32_t n : target->ranks) {
            counts += (counts.empty() ? "" : n == target->ranks.back() ? " or " : ", ") + std::to_string(n);
        }
        return machine + " has collectives over " + counts + " cores, not " + std::to_string(n_ranks);
    }
    if (target && first % n_ranks) {
        return "a program of " + std::to_string(n_ranks) + " cores begins at a core that is a multiple of " +
               std::to_string(n_ranks) + ", not at core " + std::to_string(first);
    }
    return "";
}

// Returns the most cores up to a limit that can compute one program; the limit for an unknown machine.
inline uint32_t neuron_most_ranks(const std::string & machine, uint32_t limit) {
    while (limit > 1 && !neuron_rank_error(machine, limit, 0).empty()) {
        limit--;
    }
    return limit;
}

// Returns the number of physical cores per logical core that a machine has by default; 0 for an unknown machine.
inline uint32_t neuron_default_lnc(const std::string & machine) {
    const neuron_target * target = neuron_find_target(machine);
    return target ? target->lnc : 0;
}

// Returns the bytes of HBM of a logical core of `lnc` physical ones: its share of the chip's. 0 for an unknown machine.
inline uint64_t neuron_core_memory(const std::string & machine, uint32_t lnc) {
    const neuron_target * target = neuron_find_target(machine);
    return target ? (target->gib << 30) * lnc : 0;
}

// Returns whether NEFFs for `target` run on a machine of the target `machine`. True if `machine` is "".
inline bool neuron_runs_on(const std::string & target, const std::string & machine) {
    const neuron_target * known = neuron_find_target(machine);
    return known ? std::find(known->runs.begin(), known->runs.end(), target) != known->runs.end() : machine.empty();
}
