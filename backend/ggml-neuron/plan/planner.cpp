// The cache of plans.

#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "device/known_bytes.h"
#include "plan/plan.h"
#include "report/metrics.h"
#include "select/group_key.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

// The most nodes in all plans of a backend.
static constexpr size_t MAX_PLANNED_NODES = 1 << 16;

// The most graphs whose groups a backend keeps until they are computed: parts of a call, and graphs that only reserve
// memory.
static constexpr size_t MAX_FOUND = 256;

// Returns a hash that distinguishes graphs without a uid. It covers all inputs of a plan, or, with `placed` false, all
// inputs of groups: these exclude the tensors' memory.
static uint64_t fingerprint(const ggml_cgraph * cgraph, bool placed) {
    nk::word_hash h;
    const auto    add_tensor = [&h, placed](const ggml_tensor * t) {
        h.add((uint64_t) (uintptr_t) t);
        h.add((uint64_t) (uintptr_t) t->view_src);
        if (placed) {
            h.add((uint64_t) (uintptr_t) t->data);
            h.add((uint64_t) (uintptr_t) (neuron_buffer_of_root(t)));
        } else {
            h.add((uint64_t) t->view_offs);
        }
        h.add((uint64_t) t->type);
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            h.add((uint64_t) t->ne[i]);
            h.add(t->nb[i]);
        }
    };
    h.add((uint64_t) cgraph->n_nodes);
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        // the uses outside of a group depend on these, even if the same nodes are part of another graph
        h.add((uint64_t) node->flags);
        h.add((uint64_t) neuron_uses_in_graph(cgraph, node));
        if (!neuron_is_work(node)) {
            h.add((uint64_t) (uintptr_t) node);
            for (const ggml_tensor * src : node->src) {
                h.add((uint64_t) (uintptr_t) src);
            }
            continue;
        }
        h.add((uint64_t) node->op);
        for (const int32_t param : node->op_params) {
            h.add((uint32_t) param);
        }
        add_tensor(node);
        for (const ggml_tensor * src : node->src) {
            if (src) {
                add_tensor(src);
            } else {
                h.add(nk::ABSENT_WORD);
            }
        }
    }
    return h.value();
}

const neuron_groups & neuron_planner::find_groups(const ggml_cgraph * cgraph) {
    const uint64_t key   = fingerprint(cgraph, false);
    const auto     known = found.find(key);
    if (known != found.end()) {
        return known->second;
    }
    if (found.size() >= MAX_FOUND) {
        found.clear();
    }
    return found.emplace(key, neuron_find_groups(cgraph, kernels, false)).first->second;
}

neuron_groups neuron_planner::take_groups(const ggml_cgraph * cgraph, neuron_unmet unmet) {
    const bool watched = neuron_is_watched(cgraph);
    const auto known   = watched || unmet || found.empty() ? found.end() : found.find(fingerprint(cgraph, false));
    if (known == found.end()) {
        return neuron_find_groups(cgraph, kernels, watched, unmet);
    }
    neuron_groups groups = std::move(known->second);  // the plan is kept from now on
    found.erase(known);
    g_metrics.found_before.fetch_add(1, std::memory_order_relaxed);
    return groups;
}

// Drops the least recently used plans until half the room is free.
void neuron_planner::forget() {
    std::vector<uint64_t>                                    ages;
    std::vector<std::unordered_map<uint64_t, neuron_plan> *> all;
    for (size_t i = 0; i < neuron_unmet::N; i++) {
        all.insert(all.end(), { &by_uid[i], &by_content[i] });
    }
    for (const auto * plans : all) {
        for (const auto & entry : *plans) {
            ages.push_back(entry.second.last_used);
        }
    }
    std::nth_element(ages.begin(), ages.begin() + ages.size() / 2, ages.end());
    const uint64_t limit = ages[ages.size() / 2];
    n_planned            = 0;
    for (auto * plans : all) {
        for (auto it = plans->begin(); it != plans->end();) {
            if (it->second.last_used <= limit) {
                it = plans->erase(it);
            } else {
                n_planned += it->second.nodes.size() + 1;
                ++it;
            }
        }
    }
}

bool neuron_planner::is_valid(const ggml_cgraph * cgraph, const neuron_plan & plan) const {
    if (!plan.whole || plan.epoch != core.epoch || plan.n_graph_nodes != cgraph->n_nodes ||
        plan.fused != fusion.is_enabled()) {
        return false;
    }
    // a fingerprint covers this for graphs without a uid
    return !cgraph->uid || std::all_of(plan.nodes.begin(), plan.nodes.end(), [cgraph](const neuron_planned & planned) {
        const bool same = std::all_of(planned.numbers.begin(), planned.numbers.end(), [&](const auto & numbers) {
            const std::vector<float> now = neuron_numbers_of(planned.members, numbers.of);
            return memcmp(now.data(), numbers.values.data(), now.size() * sizeof(float)) == 0;
        });
        return same && std::all_of(planned.members.begin(), planned.members.end(), [cgraph](const neuron_member & m) {
                   return cgraph->nodes[m.index] == m.node && m.node->data == m.data;
               });
    });
}

// locked. Sets `plan` to the graph's plan for a set of unmet conditions.
enum ggml_status neuron_planner::keep(const ggml_cgraph * cgraph, neuron_unmet unmet, neuron_plan *& found) {
    if (n_planned > MAX_PLANNED_NODES) {
        forget();
    }
    const size_t  i    = unmet.index();
    neuron_plan & plan = cgraph->uid ? by_uid[i][cgraph->uid] : by_content[i][fingerprint(cgraph, true)];
    if (plan.last_used == 0) {
        n_planned++;  // also counts graphs that have only views
    }
    plan.last_used = ++clock;
    found          = &plan;
    if (is_valid(cgraph, plan)) {
        return GGML_STATUS_SUCCESS;
    }
    n_planned -= plan.nodes.size();
    const enum ggml_status status = make(cgraph, unmet, plan);
    if (status != GGML_STATUS_SUCCESS) {
        plan.epoch = 0;
        plan.nodes.clear();
        plan.causal_conditions.clear();
        plan.row_conditions.clear();
        plan.hidden_conditions.clear();
    }
    n_planned += plan.nodes.size();
    return status;
}

// locked. Sets `unmet` to a plan's unmet conditions.
enum ggml_status neuron_planner::check(const neuron_plan & plan, neuron_unmet & unmet) const {
    using bytes = std::shared_ptr<const uint8_t>;
    std::unordered_map<const ggml_tensor *, bytes> data;  // layers share masks and row numbers
    const auto                                     read = [&](const ggml_tensor * t) {
        if (data.count(t)) {
            return true;
        }
        neuron_operand where;
        if (!locate(core, t, where)) {
            return false;
        }
        if (!where.memory) {
            data[t] = { bytes(), (const uint8_t *) t->data };
            return true;
        }
        return neuron_recall(where, data[t]) == NRT_SUCCESS;
    };
    unmet = {};
    for (auto h = plan.row_conditions.begin(); h != plan.row_conditions.end() && !unmet.rows; ++h) {
        if (!read(h->rows)) {
            return GGML_STATUS_FAILED;
        }
        unmet.rows = !neuron_are_rows_among(*h, data.at(h->rows).get());
    }
    for (auto h = plan.causal_conditions.begin(); h != plan.causal_conditions.end() && !unmet.causal; ++h) {
        if (!read(h->rows) || !read(h->mask)) {
            return GGML_STATUS_FAILED;
        }
        unmet.causal = !neuron_is_causal(*h, data.at(h->rows).get(), data.at(h->mask).get());
    }
    for (auto h = plan.hidden_conditions.begin(); h != plan.hidden_conditions.end() && !unmet.hidden; ++h) {
        if (!read(h->mask)) {
            return GGML_STATUS_FAILED;
        }
        unmet.hidden = !neuron_is_hidden(*h, data.at(h->mask).get());
    }
    return GGML_STATUS_SUCCESS;
}

enum ggml_status neuron_planner::get(const ggml_cgraph * cgraph, const neuron_plan ** found) {
    neuron_unmet unmet;
    while (true) {
        neuron_plan *    plan   = nullptr;
        enum ggml_status status = keep(cgraph, unmet, plan);
        *found                  = plan;
        if (status != GGML_STATUS_SUCCESS || !plan->has_conditions()) {
            return status;
        }
        neuron_unmet more;
        status = check(*plan, more);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        // another thread may have freed memory while the check waited for data
        if (!more && plan->epoch == core.epoch) {
            return status;
        }
        unmet = unmet | more;  // plans for `unmet` do not depend on these conditions
    }
}
