// The rooms of a group's slots for a kernel for longer groups (select/group_lengths.h).

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

#include <vector>

namespace neuron_fit {

// Finds nodes that look up rows which other nodes read as a matrix with an element per pair of tokens, such as T5's
// bias. Sets their columns.
void find_matrices(std::vector<node> & nodes);

// Returns whether two axes of a view are the columns and rows of a matrix of a tensor's rows.
bool is_matrix_of(const tensor_pair & of, const tensor_pair & view, int column, int row);

// Sets the rooms of slots, whose sizes are known, for the nodes. Returns false when a slot would need several kinds of
// room.
//
// any_rows  whether the group may be any rows of the kernel
bool find_rooms(const std::vector<node> & nodes,
                const sequence_blocks &   blocks,
                bool                      any_rows,
                std::vector<slot> &       slots);

// Returns whether a node is an in-place sum over devices of rows in a slot. All devices repeat the same rows, so the
// sum of the copies is a copy of the sum.
bool is_sum_in_place(const node & n);

}  // namespace neuron_fit
