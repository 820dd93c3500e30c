// Groups that a kernel for fewer tokens computes in pieces.
//
// The group's key and the kernel's are equal except for extents: the kernel has fewer tokens, and maybe a longer cache.
// A piece is between the two: it has the kernel's tokens and the group's cache. select/group_lengths.h checks that any
// rows of the group form such a piece, and that the kernel computes it. This file checks the memory that the group
// writes and reads: the mask must hide from each piece the cache rows that a later piece writes (select/causality.h).

#pragma once

#include "select/group_lengths.h"

// Returns whether a kernel computes a group in pieces, and sets `fit`. The keys must have the same wiring.
bool neuron_fit_pieces(const neuron_key & group, const neuron_key & kernel, neuron_group_fit & fit);
