// The values beyond a group's elements in an op's result. They follow from the rules of tools/kernelgen/ggml/ops.py and
// the rules of attention without flash attention (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

namespace neuron_fit {

// Sets the values beyond a node's elements from the values beyond its sources' elements. Returns false when the node's
// own elements depend on the elements beyond.
//
// any_rows  whether the group may be any rows of the kernel
bool follow_op(node & n, const sequence_blocks & blocks, bool any_rows);

}  // namespace neuron_fit
