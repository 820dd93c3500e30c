// What a group's slots have to have for a kernel for longer groups (select/group_lengths.h): their rooms.

#pragma once

#include "select/group_fit.h"
#include "select/group_fit_blocks.h"

#include <vector>

namespace neuron_fit {

// Finds nodes that look up rows which others read as a matrix of them: those for each pair of tokens, as T5's bias has. Sets their columns.
void find_matrices(std::vector<node> & nodes);

// Returns whether axes of a view are the columns and rows of a matrix of a tensor's rows.
bool is_matrix_of(const tensor_pair & of, const tensor_pair & view, int column, int row);

// Sets what slots, whose sizes are known, have to have for the nodes. Returns false where a slot would have to have several things.
//
// any_rows  whether the group is to be any rows of the kernel
bool find_rooms(const std::vector<node> & nodes,
                const sequence_blocks &   blocks,
                bool                      any_rows,
                std::vector<slot> &       slots);

// Returns whether a node is a sum over devices of rows that a slot has, in their place. Copies of rows sum up to copies of the sum, for
// all devices have the same rows again.
bool is_sum_in_place(const node & n);

}  // namespace neuron_fit
