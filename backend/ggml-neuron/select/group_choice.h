// The choice of kernels for a group of other lengths: one for more tokens or a longer cache, or several, one after the
// other.

#pragma once

#include "select/group_pieces.h"
#include "select/groups.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

// A kernel for a group, or for pieces of it.
struct neuron_group_option {
    const neuron_group_kernel * kernel = nullptr;
    neuron_group_fit            fit;
};

// The kernels for a group.
struct neuron_group_choice {
    std::optional<neuron_group_option> whole;    // one kernel for the whole group
    std::vector<neuron_group_option>   options;  // for pieces
    std::vector<neuron_range>          ranges;   // the pieces; empty: one launch is better, or nothing is possible

    // Returns the option for pieces of this many tokens, or NULL.
    const neuron_group_option * option_for(int64_t n) const;
};

// Returns how a kernel computes a group, or pieces of it; nothing when it can't.
//
// whole  whether the kernel must compute the whole group
std::optional<neuron_group_option> neuron_try_kernel(const neuron_group_kernel & kernel,
                                                     const neuron_key &          group,
                                                     bool                        whole);

using neuron_group_attempt =
    std::function<std::optional<neuron_group_option>(const neuron_group_kernel & kernel, bool whole)>;

// Chooses the fastest kernels for a group. The kernels' keys have as many words as the group's.
//
// kernels  ascending in size
// attempt  neuron_try_kernel with further checks. It is slow, so it is called only for kernels that may be chosen
neuron_group_choice neuron_choose_kernels(const std::vector<const neuron_group_kernel *> & kernels,
                                          const neuron_key &                               group,
                                          const neuron_group_attempt &                     attempt);
