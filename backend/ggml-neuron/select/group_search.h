// Searches a graph for groups that kernels compute, from its first node to its last.

#pragma once

#include "ggml-impl.h"
#include "select/causality.h"
#include "select/groups.h"
#include "select/kernel_store.h"
#include "select/streams.h"

// Finds the groups of a graph for neuron_find_groups.
//
// streams  the owner of the graph; NULL: the graph is ggml's
neuron_groups neuron_search_groups(const ggml_cgraph *         cgraph,
                                   const neuron_kernel_store & kernels,
                                   bool                        watched,
                                   neuron_unmet                unmet,
                                   const neuron_streams *      streams = nullptr);
