// Which groups can be computed some rows after the other, by a kernel for fewer tokens than they have.
//
// The group's key and the kernel's say the same except for extents: those of the tokens are smaller in the kernel, those of the cache
// may be larger. Between the two is what the kernel is to compute, a piece: with the kernel's tokens and the group's cache. That
// any rows of the group are such a piece, and that the kernel computes it, select/group_lengths.h finds out. What is left is memory that the
// group writes and reads: the rows of a cache that a later piece writes have to be masked for this one (select/causality.h).

#pragma once

#include "select/group_lengths.h"

// Returns whether a kernel computes a group, whose key is wired as the kernel's, in pieces, and sets `fit`.
bool neuron_fit_pieces(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit);
