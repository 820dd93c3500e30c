// What an op's result has beyond a group's elements, by the rules of tools/kernelgen/ggml/ops.py and those for attention without flash
// attention (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

namespace neuron_fit {

// Sets what is beyond the elements of a node whose sources are known; returns false when its elements depend on what is beyond theirs.
//
// any_rows  whether the group is to be any rows of the kernel
bool follow_op(node & n, const sequence_blocks & blocks, bool any_rows);

}  // namespace neuron_fit
