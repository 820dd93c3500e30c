// The values beyond a group's elements in the sources of nodes: in slots, or in other nodes (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

#include <vector>

namespace neuron_fit {

// Sets the values beyond a source's elements. Returns false when the kernel has the source's elements in another place.
bool refer(const std::vector<node> & nodes,
           const std::vector<slot> & slots,
           const sequence_blocks &   blocks,
           input &                   in);

// Does the same for a source in a node. A node's memory is dense. A view of it has the node's axes in some order, or
// the same bytes.
bool refer_to_node(const node & of, const sequence_blocks & blocks, input & in);

}  // namespace neuron_fit
