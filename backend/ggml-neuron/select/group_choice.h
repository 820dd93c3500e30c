// Which kernels compute a group of other lengths than theirs: one for more tokens or a longer cache, or several after each other.

#pragma once

#include "select/group_pieces.h"
#include "select/groups.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

// A kernel that computes a group, or pieces of it.
struct neuron_group_option {
    const neuron_group_kernel * kernel = nullptr;
    neuron_group_fit            fit;
};

// What computes a group.
struct neuron_group_choice {
    std::optional<neuron_group_option> whole;    // one kernel for all of it
    std::vector<neuron_group_option>   options;  // of pieces
    std::vector<neuron_range>          ranges;  // the pieces; none: all of it at once is better, or nothing is possible

    // Returns the option for pieces of as many tokens, or NULL.
    const neuron_group_option * option_for(int64_t n) const;
};

// Returns how a kernel computes a group, or pieces of it; none when it does not.
//
// whole  whether one that computes all of the group is looked for
std::optional<neuron_group_option> neuron_try_kernel(const neuron_group_kernel & kernel,
                                                     const neuron_key &          group,
                                                     bool                        whole);

using neuron_group_attempt =
    std::function<std::optional<neuron_group_option>(const neuron_group_kernel & kernel, bool whole)>;

// Chooses what takes least time for a group with a key of as many words as the kernels' have.
//
// kernels  ascending in size
// attempt  neuron_try_kernel, and what else has to be looked at: only for kernels that may be chosen, as it takes longer than all else
neuron_group_choice neuron_choose_kernels(const std::vector<const neuron_group_kernel *> & kernels,
                                          const neuron_key &                               group,
                                          const neuron_group_attempt &                     attempt);
