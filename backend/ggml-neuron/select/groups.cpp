#include "select/groups.h"

#include "select/group_search.h"
#include "select/streams.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

const char * neuron_ungrouped_name(int reason) {
    static const char * const names[NEURON_UNGROUPED_COUNT] = {
        "no group has such a node",
        "their groups have other nodes beside them",
        "their group has no kernel for this many tokens and cells, nor for more",
        "their group is for fewer tokens, and earlier tokens read what later ones write",
        "their part of the graph ends before the group does",
        "their group is wired in another way",
        "another result of their group is used outside of it",
        "their group's tensors overlap",
        "their group's kernel can't be used",
    };
    return names[reason];
}

// Adds ggml's nodes whose parts are not all in one group of a graph of streams to `whole`. Returns whether there are
// any.
static bool leave_whole(const neuron_streams & streams, const neuron_groups & groups, std::unordered_set<int> & whole) {
    std::unordered_set<int> together;
    for (const neuron_group & group : groups.groups) {
        std::unordered_map<int, int> n_parts;
        for (const int i : group.nodes) {
            n_parts[streams.unit(streams.original(i))]++;
        }
        for (const auto & [node, n] : n_parts) {
            if (n == streams.n_parts(node)) {
                together.insert(node);
            }
        }
    }
    const size_t before = whole.size();
    for (int i = 0; i < streams.graph()->n_nodes; i++) {
        const int unit = streams.unit(streams.original(i));
        if (streams.n_parts(unit) > 1 && !together.count(unit)) {
            whole.insert(unit);
        }
    }
    return whole.size() != before;
}

// Finds the groups of a graph with attention of several sequences, each with its own cache: groups of ggml's nodes, and
// groups of nodes per sequence. Sets `found` to the result, or leaves it unchanged when there are none.
static void find_with_streams(const ggml_cgraph *         cgraph,
                              const neuron_kernel_store & kernels,
                              neuron_unmet                unmet,
                              neuron_groups &             found) {
    std::unordered_set<int> whole;
    for (const neuron_group & group : found.groups) {
        whole.insert(group.nodes.begin(), group.nodes.end());
    }
    while (true) {
        const neuron_streams streams(cgraph, whole);
        if (streams.empty()) {
            return;
        }
        neuron_groups groups = neuron_search_groups(streams.graph(), kernels, false, unmet, &streams);
        if (leave_whole(streams, groups, whole)) {
            continue;
        }
        // the cache of a single sequence may also be the first cells of a shared cache
        if (!streams.has_several() && groups.outside.size() >= found.outside.size()) {
            return;
        }
        for (neuron_group & group : groups.groups) {
            streams.restore(group);
        }
        for (auto & [node, reason] : groups.outside) {
            node = streams.original(node);
        }
        found = std::move(groups);
        return;
    }
}

neuron_groups neuron_find_groups(const ggml_cgraph *         cgraph,
                                 const neuron_kernel_store & kernels,
                                 bool                        watched,
                                 neuron_unmet                unmet) {
    if (kernels.groups.empty()) {
        return {};
    }
    neuron_groups found = neuron_search_groups(cgraph, kernels, watched, unmet);
    if (!watched && !unmet.rows && !kernels.is_exact_only() &&
        std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_has_streams)) {
        find_with_streams(cgraph, kernels, unmet, found);
    }
    return found;
}
