#pragma once

// The values of neuronx-cc's --target, as a machine and a bundle of kernels have them.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "targets.inc"

// Returns the target that an architecture's name begins with ("trn1n" for "trn1n.32xlarge"), the longest; "" when there is none.
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

// Returns the target of machines of a family (NRT_INSTANCE_TRN1 and the like of nrt.h); "" when it is not known.
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

// Returns how many physical cores a logical one of a machine has unless NEURON_LOGICAL_NC_CONFIG says otherwise; 0 when that is not known.
inline uint32_t neuron_default_lnc(const std::string & machine) {
    for (const neuron_target & known : NEURON_TARGETS) {
        if (machine == known.name) {
            return known.lnc;
        }
    }
    return 0;
}

// Returns how many it has; 0 when that is not known.
inline uint32_t neuron_lnc(const std::string & machine) {
    const char * configured = getenv("NEURON_LOGICAL_NC_CONFIG");
    return configured && *configured ? (uint32_t) atoi(configured) : neuron_default_lnc(machine);
}

// Whether NEFFs for `target` run on a machine of the target `machine`; yes where the machine is not known.
inline bool neuron_runs_on(const std::string & target, const std::string & machine) {
    for (const neuron_target & known : NEURON_TARGETS) {
        if (machine == known.name) {
            return std::find(known.runs.begin(), known.runs.end(), target) != known.runs.end();
        }
    }
    return machine.empty();
}
