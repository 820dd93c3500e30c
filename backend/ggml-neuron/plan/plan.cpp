#include "plan/plan.h"

#include "plan/placement.h"
#include "report/log.h"
#include "select/numbers.h"

#include <algorithm>
#include <string>

std::vector<float> neuron_numbers_of(const std::vector<neuron_member> & members, const std::vector<int> & of) {
    std::vector<float> numbers;
    for (const int i : of) {
        neuron_add_numbers(members[(size_t) i].node, numbers);
    }
    return numbers;
}

// locked. Binds the kernels of a candidate. On failure leaves it to the CPU and marks it as unusable.
static void bind_one(neuron_core &            core,
                     neuron_memory *          scratch,
                     neuron_fusion &          fusion,
                     const neuron_candidate & c,
                     neuron_planned &         planned,
                     bool &                   whole) {
    const neuron_group & group = c.group();
    std::string          message;
    bool                 broken = false;
    if (c.placement.bind(core, fusion, scratch, group, planned, message, broken)) {
        return;
    }
    const char * op = ggml_op_desc(planned.last());
    if (!message.empty() && group.fused) {
        NEURON_WARN("%s; computing its %zu nodes one by one%s\n", message.c_str(), group.nodes.size(),
                    broken ? "" : " this time");
    } else if (!message.empty()) {
        NEURON_WARN("%s; computing %s on the CPU%s\n", message.c_str(), op, broken ? "" : " this time");
    } else if (!group.fused) {
        NEURON_LOG("memory is missing; computing %s on the CPU\n", op);
    }
    if (c.found) {
        c.found->unusable = true;
    }
    whole            = whole && broken;
    planned.unusable = broken;
    planned.launches.clear();
    planned.numbers.clear();
}

// Merges the nodes' equal masks into the first of them.
static void share_masks(neuron_plan & plan) {
    std::vector<size_t> made;  // by offset in scratch memory
    for (neuron_planned & planned : plan.nodes) {
        auto & masks = planned.masks;
        masks.erase(std::remove_if(masks.begin(), masks.end(),
                                   [&](const neuron_long_mask & m) {
                                       return std::find(made.begin(), made.end(), m.to.offset) != made.end();
                                   }),
                    masks.end());
        for (const neuron_long_mask & m : masks) {
            made.push_back(m.to.offset);
        }
    }
}

// locked
static enum ggml_status bind_all(neuron_core &                         core,
                                 neuron_memory *                       scratch,
                                 const ggml_cgraph *                   cgraph,
                                 neuron_fusion &                       fusion,
                                 const std::vector<neuron_candidate> & candidates,
                                 neuron_plan &                         plan) {
    // Binding may destroy older bound launches, among them this plan's: then it starts again, once.
    for (int attempt = 0; attempt < 2; attempt++) {
        plan.epoch         = core.epoch;
        plan.n_graph_nodes = cgraph->n_nodes;
        plan.whole         = true;
        plan.nodes.clear();
        plan.nodes.reserve(candidates.size());
        for (const neuron_candidate & c : candidates) {
            plan.nodes.emplace_back();
            neuron_planned & planned = plan.nodes.back();
            const auto       add     = [&](int index) {
                planned.members.push_back({ index, cgraph->nodes[index], cgraph->nodes[index]->data });
            };
            const std::vector<int> & nodes = c.group().nodes;
            if (nodes.empty()) {
                add(c.node);
            }
            planned.members.reserve(nodes.size());
            std::for_each(nodes.begin(), nodes.end(), add);
            if (c.group()) {
                bind_one(core, scratch, fusion, c, planned, plan.whole);
            }
        }
        if (plan.epoch == core.epoch) {
            share_masks(plan);
            return GGML_STATUS_SUCCESS;
        }
    }
    NEURON_ERROR("a graph of %d nodes is too large to bind\n", cgraph->n_nodes);
    return GGML_STATUS_FAILED;
}

// Removes groups that must be computed node by node; returns whether there were any.
template <typename F>
static bool take_out(neuron_groups & groups, neuron_ungrouped reason, neuron_plan & plan, F unusable) {
    auto &     all = groups.groups;
    const auto end = std::remove_if(all.begin(), all.end(), [&](const neuron_group & group) {
        if (unusable(group)) {
            plan.outside[reason] += (uint32_t) group.nodes.size();
            return true;
        }
        return false;
    });
    const bool any = end != all.end();
    all.erase(end, all.end());
    return any;
}

// Returns the conditions of one kind of all groups, without duplicates: layers share them.
template <typename T>
static std::vector<T> conditions_of(const neuron_groups & groups, std::vector<T> neuron_group::* kind) {
    std::vector<T> all;
    for (const neuron_group & group : groups.groups) {
        for (const T & h : group.*kind) {
            if (std::find(all.begin(), all.end(), h) == all.end()) {
                all.push_back(h);
            }
        }
    }
    return all;
}

// Returns the row conditions of groups and single nodes, without duplicates.
static std::vector<neuron_row_condition> row_conditions_of(const ggml_cgraph *                   cgraph,
                                                           const std::vector<neuron_candidate> & candidates) {
    std::vector<neuron_row_condition> all;
    const auto                        add = [&](const neuron_row_condition & h) {
        if (std::find(all.begin(), all.end(), h) == all.end()) {
            all.push_back(h);
        }
    };
    for (const neuron_candidate & c : candidates) {
        const neuron_group & group = c.group();
        std::for_each(group.row_conditions.begin(), group.row_conditions.end(), add);
        if (group.n_rows) {
            add({ cgraph->nodes[c.node]->src[neuron_group_causal_condition::ROWS_SOURCE], 0, group.n_rows });
        }
    }
    return all;
}

// locked
enum ggml_status neuron_planner::make(const ggml_cgraph * cgraph, neuron_unmet unmet, neuron_plan & plan) {
    neuron_groups groups;
    plan.fused = fusion.is_enabled();
    plan.outside.fill(0);
    plan.ops.reset();
    plan.whole = true;
    if (plan.fused) {
        groups = take_groups(cgraph, unmet);
        for (const auto & [node, reason] : groups.outside) {
            plan.outside[reason]++;
        }
        take_out(groups, NEURON_UNGROUPED_KERNEL, plan, [this](const neuron_group & group) {
            return std::any_of(group.pieces.begin(), group.pieces.end(),
                               [this](const neuron_group_piece & piece) { return core.is_unusable(piece.kernel); });
        });
        take_out(groups, NEURON_UNGROUPED_MEMORY, plan, [&](const neuron_group & group) {
            return !neuron_placement().place(core, locate, cgraph->nodes[group.last()], group).empty();
        });
    }
    bool whole = true;
    while (true) {
        const enum ggml_status status = make(cgraph, groups, unmet, plan);
        whole                         = whole && plan.whole;
        if (status != GGML_STATUS_SUCCESS || !take_out(groups, NEURON_UNGROUPED_KERNEL, plan,
                                                       [](const neuron_group & group) { return group.unusable; })) {
            plan.whole             = whole;
            plan.causal_conditions = conditions_of(groups, &neuron_group::causal_conditions);
            plan.hidden_conditions = conditions_of(groups, &neuron_group::hidden_conditions);
            return status;
        }
    }
}

// locked. Makes the plan with these groups, and marks groups that can't be bound.
enum ggml_status neuron_planner::make(const ggml_cgraph * cgraph,
                                      neuron_groups &     groups,
                                      neuron_unmet        unmet,
                                      neuron_plan &       plan) {
    std::vector<neuron_candidate> candidates = neuron_find_candidates(cgraph, kernels, groups, unmet);
    plan.row_conditions                      = row_conditions_of(cgraph, candidates);
    std::vector<neuron_long_mask> masks;
    size_t                        scratch_size = 0;
    for (neuron_candidate & c : candidates) {
        const neuron_group & group = c.group();
        if (!group) {
            continue;
        }
        const std::string wrong = c.placement.place(core, locate, cgraph->nodes[c.node], group);
        if (!wrong.empty()) {
            NEURON_ERROR("%s\n", wrong.c_str());
            return GGML_STATUS_FAILED;
        }
        scratch_size = std::max(scratch_size, c.placement.scratch());
    }
    for (neuron_candidate & c : candidates) {
        scratch_size = c.placement.place_masks(masks, scratch_size);
    }
    neuron_memory * scratch = nullptr;
    if (scratch_size) {
        scratch = core.scratch(scratch_size);
        if (!scratch) {
            return GGML_STATUS_ALLOC_FAILED;
        }
    }
    return bind_all(core, scratch, cgraph, fusion, candidates, plan);
}
