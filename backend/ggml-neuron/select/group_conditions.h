// Conditions on a graph for the kernels of a group (select/causality.h).

#pragma once

#include "ggml-impl.h"
#include "select/causality.h"
#include "select/group.h"
#include "select/group_index.h"
#include "select/group_key.h"
#include "select/group_lengths.h"
#include "select/streams.h"

#include <unordered_set>
#include <vector>

class neuron_group_conditions {
  public:
    // work     the graph's nodes to compute; the caller keeps it alive
    // unmet    conditions that are known to be unmet
    // streams  the owner of the graph; NULL: the graph is ggml's
    neuron_group_conditions(const ggml_cgraph *      cgraph,
                            const std::vector<int> & work,
                            neuron_unmet             unmet,
                            const neuron_streams *   streams) :
        cgraph(cgraph), work(work), unmet(unmet), streams(streams) {}

    // Returns whether the row numbers that differ in a kernel are known before the graph is computed.
    bool can_rename(const neuron_group_fit & fit, const neuron_group & group);

    // Sets the causal conditions for computing a group in pieces with a kernel's fit. Returns false when they are
    // unmet, or can't be checked before the graph is computed.
    bool find_causal(const neuron_group_fit & fit, const std::vector<neuron_range> & pieces, neuron_group & group);

    // Returns whether a kernel for a group leaves out no cells, or only cells that a mask may hide.
    bool may_leave_out(const neuron_group_kernel & kernel, neuron_variant variant, const neuron_group & group);

    // Adds the conditions for a kernel that leaves out cells, for some tokens of a group, or for all if `range` is
    // empty.
    void add_hidden(const neuron_group_kernel & kernel,
                    neuron_variant              variant,
                    neuron_range                range,
                    neuron_group &              group) const;

    // Sets the row conditions for a kernel of a group, or for it and the kernels that go with it and have the same
    // number of cache rows. Returns false when they are unmet, or can't be checked before the graph is computed.
    bool find_rows(const neuron_kernel & kernel, neuron_group & group);

  private:
    template <typename F>
    bool for_each_hidden(const neuron_group_kernel & kernel,
                         neuron_variant              variant,
                         const neuron_group &        group,
                         F                           use) const;

    bool count_from(int64_t first, const ggml_tensor * rows, neuron_group & group) const;

    bool is_changed(const ggml_tensor * t);

    const ggml_cgraph *                     cgraph;
    const std::vector<int> &                work;
    const neuron_unmet                      unmet;
    const neuron_streams *                  streams;
    std::unordered_set<const ggml_tensor *> changed;  // roots of computed tensors; filled at the first need
};
