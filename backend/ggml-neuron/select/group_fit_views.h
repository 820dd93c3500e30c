// What a node's sources have beyond a group's elements, in slots or in other nodes (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

#include <vector>

namespace neuron_fit {

// Finds out what is beyond a source's elements; returns false when these are not where the kernel has them.
bool refer(const std::vector<node> & nodes,
           const std::vector<slot> & slots,
           const sequence_blocks &   blocks,
           input &                   in);

// The same of a source in a node. The memory of a node is dense. A view of it has the node's axes in some order, or is at the same bytes.
bool refer_to_node(const node & of, const sequence_blocks & blocks, input & in);

}  // namespace neuron_fit
