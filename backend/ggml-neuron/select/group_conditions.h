// What has to be so when a graph is computed, for kernels that compute a group of it: the conditions of select/causality.h as a group has them.

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
    // work     the graph's nodes that have to be computed, which stays where it is
    // unmet    conditions that are known not to be met
    // streams  whose graph it is; NULL: ggml's
    neuron_group_conditions(const ggml_cgraph *      cgraph,
                            const std::vector<int> & work,
                            neuron_unmet             unmet,
                            const neuron_streams *   streams) :
        cgraph(cgraph), work(work), unmet(unmet), streams(streams) {}

    // Returns whether numbers of rows that are other ones in a kernel are known before the graph is computed.
    bool can_rename(const neuron_group_fit & fit, const neuron_group & group);

    // Sets the causal conditions for a group to be computed in pieces, as a kernel of them fits. Returns false when that is not known before
    // the graph is computed, or not so.
    bool find_causal(const neuron_group_fit & fit, const std::vector<neuron_range> & pieces, neuron_group & group);

    // Returns whether a kernel for a group leaves out nothing, or what masks may turn out to hide when the graph is computed.
    bool may_leave_out(const neuron_group_kernel & kernel, neuron_variant variant, const neuron_group & group);

    // Adds the conditions for a kernel that may leave out cells to compute some tokens of a group, or all where `range` is empty.
    void add_hidden(const neuron_group_kernel & kernel,
                    neuron_variant              variant,
                    neuron_range                range,
                    neuron_group &              group) const;

    // Sets the row conditions for a group to be computed by a kernel, or by it and those that go together with it, which have as many rows
    // of a cache. Returns false when these are not met, or that is not known before the graph is computed.
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
    std::unordered_set<const ggml_tensor *> changed;  // roots of what is computed, when they are first needed
};
