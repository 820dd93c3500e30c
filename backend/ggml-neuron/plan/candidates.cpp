// The kernels for the nodes of a graph: for a single node, attention, or a group.

#include "plan/placement.h"
#include "report/log.h"
#include "select/groups.h"
#include "select/tensors.h"
#include "select/unfused_attention.h"

#include <algorithm>
#include <cstddef>
#include <memory>

// Returns whether the last candidates are the nodes of attention, and no other node uses their intermediate results.
static bool is_whole_attention(const ggml_cgraph *                   cgraph,
                               const std::vector<neuron_candidate> & candidates,
                               const neuron_attention &              attention) {
    const size_t n = attention.nodes.size();
    for (size_t k = 0; k < n; k++) {
        if (candidates.size() < n) {
            return false;
        }
        const neuron_candidate & c    = candidates[candidates.size() - n + k];
        const ggml_tensor *      node = cgraph->nodes[c.node];
        if (node != attention.nodes[k].node || !c.group().nodes.empty()) {
            return false;
        }
        const bool seen = (node->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(cgraph, c.node) != 1;
        if (seen && k + 1 < n) {
            return false;
        }
    }
    // the last one's source is a view
    const ggml_tensor * view = attention.nodes.back().node->src[0];
    const size_t        at   = ggml_hash_find(&cgraph->visited_hash_set, view);
    return !(view->flags & GGML_TENSOR_FLAG_OUTPUT) && at != GGML_HASHSET_FULL &&
           ggml_bitset_get(cgraph->visited_hash_set.used, at) && cgraph->use_counts[at] == 1;
}

// Replaces the last candidates by attention as a whole, if the last one ends attention and a node of it has no kernel
// of its own, or only a kernel that requires another layout of its tensors.
static void find_attention(const neuron_kernel_store &     kernels,
                           const ggml_cgraph *             cgraph,
                           std::vector<neuron_candidate> & candidates) {
    const ggml_tensor * node      = cgraph->nodes[candidates.back().node];
    const auto          attention = neuron_ends_attention(node) ? neuron_attention_to(node, false) : nullptr;
    if (!attention || !is_whole_attention(cgraph, candidates, *attention)) {
        return;
    }
    const auto begin = candidates.end() - (std::ptrdiff_t) attention->nodes.size();
    const bool alone = std::all_of(begin, candidates.end(),
                                   [](const neuron_candidate & c) { return c.group() && !c.group().laid_out; });
    if (alone || !kernels.select(*attention)) {
        return;
    }
    const int last = candidates.back().node;
    for (auto c = begin; c != candidates.end(); ++c) {
        attention->group.nodes.push_back(c->node);
    }
    candidates.erase(begin, candidates.end());
    candidates.push_back({
        last, { attention, &attention->group }
    });
}

// Returns whether a SET_ROWS may write only its first rows: its row numbers are an input of the graph, and may turn out
// to be the first numbers.
static bool may_have_first_rows(const ggml_cgraph * cgraph, const ggml_tensor * node, neuron_unmet unmet) {
    const ggml_tensor * rows = node->src[neuron_group_causal_condition::ROWS_SOURCE];
    return !unmet.rows && neuron_can_read_rows(rows) &&
           std::none_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, [rows](const ggml_tensor * other) {
               return neuron_is_work(other) && neuron_root_of(other) == neuron_root_of(rows);
           });
}

// Warns once of a graph that writes to caches of several sequences one by one, although kernels of groups write to one.
// Groups for no call of its length, and groups whose conditions are unmet, have messages of their own.
static void warn_of_streams(const ggml_cgraph *                   cgraph,
                            const neuron_kernel_store &           kernels,
                            const std::vector<neuron_candidate> & candidates) {
    const auto writes_streams = [cgraph](const neuron_candidate & c) {
        const ggml_tensor * node = cgraph->nodes[c.node];
        return c.group().nodes.empty() && node->op == GGML_OP_SET_ROWS && neuron_root_of(node)->ne[2] > 1;
    };
    const auto is_longer = [&kernels](const ggml_tensor * node) {
        return kernels.fewer_cells(node) > 0;
    };
    const auto writer = std::find_if(candidates.begin(), candidates.end(), writes_streams);
    if (kernels.groups.empty() || writer == candidates.end() ||
        std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, is_longer)) {
        return;
    }
    const auto n_streams = (long long) neuron_root_of(cgraph->nodes[writer->node])->ne[2];
    NEURON_WARN("%lld sequences have a cache each, and no group of kernels computes them: each op is a launch\n"
                "use --kv-unified, or kernels of: kernelgen model --n-seq-max %lld\n",
                n_streams, n_streams);
}

std::vector<neuron_candidate> neuron_find_candidates(const ggml_cgraph *         cgraph,
                                                     const neuron_kernel_store & kernels,
                                                     neuron_groups &             groups,
                                                     neuron_unmet                unmet) {
    static const auto             nothing = std::make_shared<const neuron_group>();
    std::vector<neuron_candidate> candidates;
    candidates.reserve((size_t) cgraph->n_nodes);
    auto found = groups.groups.begin();
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (!neuron_is_work(node)) {
            continue;
        }
        if (found != groups.groups.end() && found->first() == i) {
            i = found->last();
            candidates.push_back({ i, nullptr, &*found });
            ++found;
            continue;
        }
        const auto answer = kernels.answer(node);
        candidates.push_back({
            i, { answer, &answer->group }
        });
        if (answer->group.n_rows && !may_have_first_rows(cgraph, node, unmet)) {
            candidates.back().known = nothing;
        }
        find_attention(kernels, cgraph, candidates);
    }
    if (!unmet) {
        warn_of_streams(cgraph, kernels, candidates);
    }
    return candidates;
}
