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

inline bool neuron_is_target(const std::string & name) {
    return std::any_of(std::begin(NEURON_TARGETS), std::end(NEURON_TARGETS),
                       [&](const neuron_target & target) { return name == target.name; });
}

// Returns the number of physical cores per logical core of a machine without NEURON_LOGICAL_NC_CONFIG; 0 for an unknown
// machine.
inline uint32_t neuron_default_lnc(const std::string & machine) {
    for (const neuron_target & known : NEURON_TARGETS) {
        if (machine == known.name) {
            return known.lnc;
        }
    }
    if (target && first % n_ranks) {
        return "a program of " + std::to_string(n_ranks) + " cores begins at a core that is a multiple of " +
               std::to_string(n_ranks) + ", not at core " + std::to_string(first);
    }
    return "";
}

// Returns the number of physical cores per logical core of a machine; 0 if unknown.
inline uint32_t neuron_lnc(const std::string & machine) {
    const char * configured = getenv("NEURON_LOGICAL_NC_CONFIG");
    return configured && *configured ? (uint32_t) atoi(configured) : neuron_default_lnc(machine);
}

// Returns whether NEFFs for `target` run on a machine of the target `machine`. True if `machine` is "".
inline bool neuron_runs_on(const std::string & target, const std::string & machine) {
    for (const neuron_target & known : NEURON_TARGETS) {
        if (machine == known.name) {
            return std::find(known.runs.begin(), known.runs.end(), target) != known.runs.end();
        }
    }
    return machine.empty();
}
