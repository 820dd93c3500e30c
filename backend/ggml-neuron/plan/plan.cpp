#include "plan/plan.h"

#include "plan/placement.h"
#include "report/log.h"
#include "report/record_ops.h"

#include <algorithm>
#include <string>
#include <utility>

// Each copy has what all before have made.
void neuron_repeat_rows(const neuron_operand & operand, size_t own, size_t period, std::vector<neuron_move> & moves) {
    const size_t gap = period - own;  // behind the last row
    for (size_t done = period; done < operand.size; done *= 2) {
        const size_t size = std::min(done - gap, operand.size - done);
        moves.push_back({
            { operand.memory, operand.offset,        size },
            { operand.memory, operand.offset + done, size }
        });
    }
}

// Fills an operand's rows beyond the node's own with copies of these: every row of a kernel's input is one that ggml made.
static void fill_rows(const neuron_candidate &   c,
                      int                        i,
                      const neuron_operand &     operand,
                      std::vector<neuron_move> & moves) {
    const neuron_kernels_tensor & t    = c.signature.tensors[i];
    const int                     axis = c.selection.cut.axis[i];
    const size_t own = neuron_nbytes(c.selection.cut.piece(c.signature, i, c.selection.cut.n, c.selection.n_more));
    neuron_repeat_rows(operand, own, (size_t) c.selection.cut.n * t.nb[axis], moves);
}

// Adds the copies around a node's kernels, whose operands are bound.
static void add_copies(neuron_planned &         planned,
                       const ggml_tensor *      node,
                       const neuron_candidate & c,
                       const neuron_operand *   operands) {
    const neuron_placement & p      = c.placement;
    const neuron_kernel &    kernel = c.first_kernel();
    const auto               own    = [&](int i) {  // without what kernels have besides
        return neuron_operand{ operands[i].memory, operands[i].offset, p.home[i].size };
    };
    for (int i = 0; i < p.n_src; i++) {
        const auto same_place = [&](const neuron_transfer & u) {
            return u.core.offset == operands[i].offset;
        };
        if (p.shared[i]) {
            planned.masks.push_back({ node->src[i], p.home[i], operands[i], c.selection.n_more, c.selection.rows() });
        } else if (p.staged[i]) {
            if (neuron_is_updated(kernel, i)) {
                planned.downloads.push_back({ node->src[i], 0, operands[i] });
            }
            if (std::any_of(planned.uploads.begin(), planned.uploads.end(), same_place)) {
                continue;
            }
            planned.uploads.push_back({ node->src[i], 0, own(i) });
        } else if (p.moved[i]) {
            planned.before.push_back({ p.home[i], own(i) });
        }
        if (p.filled[i]) {
            fill_rows(c, i, operands[i], planned.before);
        }
    }
    const int result = p.n_src;
    if (p.staged[result]) {
        planned.downloads.push_back({ planned.last(), 0, own(result) });
    } else if (p.moved[result]) {
        planned.after.push_back({ own(result), p.home[result] });
    }
}

// Sets the operands of one piece: the parts of those of the whole node.
static void cut_operands(const neuron_candidate & c,
                         const neuron_piece &     piece,
                         const neuron_operand *   operands,
                         neuron_operand *         parts) {
    for (int i = 0; i <= c.placement.n_src; i++) {
        parts[i]       = operands[i];
        const int axis = c.selection.cut.axis[i];
        if (axis < 0 || !operands[i].size) {
            continue;
        }
        parts[i].offset += (size_t) piece.range.first * c.whole(i).nb[axis];
        parts[i].size = neuron_nbytes(c.selection.cut.piece(c.signature, i, piece.range.n, c.selection.n_more));
    }
}

// locked. Adds a kernel that is bound; returns whether it could be.
static bool bind_kernel(neuron_core &          core,
                        const neuron_kernel &  kernel,
                        const neuron_operand * operands,
                        size_t                 n_src,
                        neuron_planned &       planned,
                        std::string &          message,
                        bool &                 broken) {
    neuron_bound_launch * bound_launch =
        core.bind(kernel, { operands, n_src, 1, kernel.updates, nullptr }, message, broken);
    if (bound_launch) {
        planned.launches.push_back({ bound_launch, nullptr });
    }
    return bound_launch != nullptr;
}

// locked. Adds the kernels of one piece of attention; `parts` are the operands of the whole.
static bool bind_attention(neuron_core &                  core,
                           neuron_memory *                scratch,
                           const neuron_candidate &       c,
                           const neuron_attention_piece & piece,
                           const neuron_operand *         parts,
                           neuron_planned &               planned,
                           std::string &                  message,
                           bool &                         broken) {
    const neuron_attention & attention = *c.attention;
    neuron_operand           previous{};
    for (size_t k = 0; k < attention.nodes.size(); k++) {
        const neuron_attention_node & node   = attention.nodes[k];
        const int                     result = node.signature.n_src;
        neuron_operand                operands[GGML_MAX_SRC + 1];
        for (int i = 0; i < result; i++) {
            operands[i] = node.sources[i] >= 0                                 ? parts[node.sources[i]]
                          : node.sources[i] == neuron_attention_node::PREVIOUS ? previous
                                                                               : neuron_operand{};
        }
        const size_t size = neuron_nbytes(attention.piece(node, result, piece.range.n, attention.n_more));
        operands[result]  = k + 1 == attention.nodes.size() ? parts[c.placement.n_src]
                                                            : neuron_operand{ scratch, c.between[k % 2], size };
        if (!bind_kernel(core, piece.kernels[k], operands, (size_t) result, planned, message, broken)) {
            return false;
        }
        previous = operands[result];
    }
    return true;
}

// locked. Binds a node or attention, or leaves it to the CPU.
static void bind_node(neuron_core &            core,
                      neuron_memory *          scratch,
                      const neuron_candidate & c,
                      neuron_planned &         planned,
                      bool &                   whole) {
    const ggml_tensor * node = planned.last();
    neuron_operand      operands[GGML_MAX_SRC + 1];
    neuron_operand      parts[GGML_MAX_SRC + 1];
    for (int i = 0; i <= c.placement.n_src; i++) {
        operands[i] = c.placement.operands[i];
        if (!operands[i].memory && operands[i].size) {
            operands[i].memory = scratch;
        }
    }
    for (size_t k = 0; k < c.selection.pieces.size(); k++) {
        const neuron_piece & piece = c.selection.pieces[k];
        std::string          message;
        bool                 broken = false;
        if (!c.selection.is_exact()) {
            cut_operands(c, piece, operands, parts);
        }
        const bool bound =
            c.attention ? bind_attention(core, scratch, c, c.attention->pieces[k], parts, planned, message, broken)
                        : bind_kernel(core, piece.kernel, c.selection.is_exact() ? operands : parts,
                                      (size_t) c.placement.n_src, planned, message, broken);
        if (!bound) {
            if (message.empty()) {
                NEURON_LOG("memory is missing; computing %s on the CPU\n", ggml_op_desc(node));
            } else {
                NEURON_WARN("%s; computing %s on the CPU%s\n", message.c_str(), ggml_op_desc(node),
                            broken ? "" : " this time");
            }
            whole            = whole && broken;
            planned.unusable = broken;
            planned.launches.clear();
            return;
        }
    }
    planned.other = !c.selection.is_exact();
    for (const neuron_piece & piece : c.selection.pieces) {
        planned.padding += planned.other ? piece.range.n : 0;
    }
    planned.padding -= c.selection.cut.n;
    add_copies(planned, c.attention ? &c.attention->whole : node, c, operands);
}

// locked. Binds a group, or marks it as one that can't be.
static void bind_group(neuron_core &            core,
                       neuron_locate_t          locate,
                       neuron_memory *          scratch,
                       neuron_fusion &          fusion,
                       const neuron_candidate & c,
                       neuron_planned &         planned,
                       bool &                   whole) {
    std::string message;
    bool        broken = false;
    if (!c.group_placement.bind(core, fusion, scratch, *c.group, planned, message, broken)) {
        if (!message.empty()) {
            NEURON_WARN("%s; computing its %zu nodes one by one%s\n", message.c_str(), c.group->nodes.size(),
                        broken ? "" : " this time");
        }
        whole             = whole && broken;
        c.group->unusable = true;
        return;
    }
    for (const neuron_group_slot & slot : c.group->slots) {
        if (slot.mask) {
            neuron_operand from;
            locate(core, slot.mask, from);  // as when it was placed
            planned.masks.push_back({
                slot.mask, from, { scratch, slot.mask_offset, slot.room.size },
                  slot.room.columns, slot.room.rows
            });
        }
    }
}

// Lets only the first node of those with the same mask make it.
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
                                 neuron_locate_t                       locate,
                                 neuron_memory *                       scratch,
                                 const ggml_cgraph *                   cgraph,
                                 neuron_fusion &                       fusion,
                                 const std::vector<neuron_candidate> & candidates,
                                 neuron_plan &                         plan) {
    // Binding may destroy older bound launches, and the ones of this plan with them: then once more, from the beginning.
    for (int attempt = 0; attempt < 2; attempt++) {
        plan.epoch         = core.epoch;
        plan.n_graph_nodes = cgraph->n_nodes;
        plan.whole         = true;
        plan.nodes.clear();
        plan.nodes.reserve(candidates.size());
        for (const neuron_candidate & c : candidates) {
            neuron_planned planned;
            for (const int index : c.nodes) {
                planned.members.push_back({ index, cgraph->nodes[index], cgraph->nodes[index]->data });
            }
            if (c.group) {
                bind_group(core, locate, scratch, fusion, c, planned, plan.whole);
            } else if (c.selection) {
                bind_node(core, scratch, c, planned, plan.whole);
            }
            plan.nodes.push_back(std::move(planned));
        }
        if (plan.epoch == core.epoch) {
            share_masks(plan);
            return GGML_STATUS_SUCCESS;
        }
    }
    NEURON_ERROR("a graph of %d nodes is larger than can be bound at once\n", cgraph->n_nodes);
    return GGML_STATUS_FAILED;
}

// Returns whether the last candidates are the nodes of attention, and whether no other node uses what is between them.
static bool is_whole_attention(const ggml_cgraph *                   cgraph,
                               const std::vector<neuron_candidate> & candidates,
                               const neuron_attention &              attention) {
    const size_t n = attention.nodes.size();
    for (size_t k = 0; k < n; k++) {
        if (candidates.size() < n) {
            return false;
        }
        const neuron_candidate & c    = candidates[candidates.size() - n + k];
        const ggml_tensor *      node = cgraph->nodes[c.nodes.back()];
        if (node != attention.nodes[k].node || c.group || c.attention) {
            return false;
        }
        const bool seen =
            (node->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(cgraph, c.nodes.back()) != 1;
        if (seen && k + 1 < n) {
            return false;
        }
    }
    // what the last one reads is a view
    const ggml_tensor * view = attention.nodes.back().node->src[0];
    const size_t        at   = ggml_hash_find(&cgraph->visited_hash_set, view);
    return !(view->flags & GGML_TENSOR_FLAG_OUTPUT) && at != GGML_HASHSET_FULL &&
           ggml_bitset_get(cgraph->visited_hash_set.used, at) && cgraph->use_counts[at] == 1;
}

// Lets attention that the last candidate ends be computed as one, where a node of it has no kernel for itself.
static void find_attention(const neuron_kernel_store &     kernels,
                           const ggml_cgraph *             cgraph,
                           std::vector<neuron_candidate> & candidates) {
    const ggml_tensor * node      = cgraph->nodes[candidates.back().nodes.back()];
    const auto          attention = neuron_ends_attention(node) ? neuron_attention_to(node, false) : nullptr;
    if (!attention || !is_whole_attention(cgraph, candidates, *attention)) {
        return;
    }
    const auto begin = candidates.end() - (std::ptrdiff_t) attention->nodes.size();
    const bool alone =
        std::all_of(begin, candidates.end(), [](const neuron_candidate & c) { return (bool) c.selection; });
    if (alone || !kernels.select(*attention)) {
        return;
    }
    neuron_candidate whole;
    for (auto c = begin; c != candidates.end(); ++c) {
        whole.nodes.push_back(c->nodes.back());
    }
    whole.attention        = attention;
    whole.signature        = attention->signature;
    whole.selection.cut    = attention->cut;
    whole.selection.n_more = attention->n_more;
    for (const neuron_attention_piece & piece : attention->pieces) {
        whole.selection.pieces.push_back({ piece.kernels.back(), piece.range });
    }
    candidates.erase(begin, candidates.end());
    candidates.push_back(std::move(whole));
}

// Returns what computes the nodes of a graph that are in no group, and the groups, in the order of the graph.
static std::vector<neuron_candidate> find_candidates(const ggml_cgraph *         cgraph,
                                                     const neuron_kernel_store & kernels,
                                                     neuron_groups &             groups) {
    std::vector<neuron_candidate> candidates;
    auto                          group = groups.groups.begin();
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (!neuron_is_work(node)) {
            continue;
        }
        if (group != groups.groups.end() && group->first() == i) {
            neuron_candidate c;
            c.nodes = group->nodes;
            c.group = &*group;
            candidates.push_back(std::move(c));
            i = group->last();
            ++group;
            continue;
        }
        neuron_candidate c;
        c.nodes     = { i };
        c.selection = kernels.answer(node).selection;
        if (c.selection && !c.selection.is_exact()) {
            c.signature = neuron_signature_of(node);
        }
        candidates.push_back(std::move(c));
        find_attention(kernels, cgraph, candidates);
    }
    for (const neuron_candidate & c : candidates) {
        if (!c.selection && !c.group && !neuron_is_zero(c.node(cgraph))) {
            neuron_note_missing(c.node(cgraph));
        }
    }
    return candidates;
}

// Takes groups out whose nodes are to be computed one by one; returns whether there were any.
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

// Returns the causal conditions for groups to be computed in pieces, each once: layers have it in common.
static std::vector<neuron_causal_condition> causal_conditions_of(const neuron_groups & groups) {
    std::vector<neuron_causal_condition> all;
    for (const neuron_group & group : groups.groups) {
        for (const neuron_causal_condition & h : group.causal_conditions) {
            if (std::find(all.begin(), all.end(), h) == all.end()) {
                all.push_back(h);
            }
        }
    }
    return all;
}

// locked
enum ggml_status neuron_planner::make(const ggml_cgraph * cgraph, bool in_order, neuron_plan & plan) {
    neuron_groups groups;
    plan.fused = fusion.is_enabled();
    plan.outside.fill(0);
    plan.whole = true;
    if (plan.fused) {
        groups = take_groups(cgraph, in_order);
        for (const auto & [node, reason] : groups.outside) {
            plan.outside[reason]++;
        }
        take_out(groups, NEURON_UNGROUPED_KERNEL, plan, [this](const neuron_group & group) {
            return std::any_of(group.pieces.begin(), group.pieces.end(),
                               [this](const neuron_group_piece & piece) { return core.is_unusable(piece.kernel); });
        });
        take_out(groups, NEURON_UNGROUPED_MEMORY, plan, [this](const neuron_group & group) {
            return !neuron_group_placement().place(core, locate, group, 0);
        });
    }
    bool whole = true;
    while (true) {
        const enum ggml_status status = make(cgraph, groups, plan);
        whole                         = whole && plan.whole;
        if (status != GGML_STATUS_SUCCESS || !take_out(groups, NEURON_UNGROUPED_KERNEL, plan,
                                                       [](const neuron_group & group) { return group.unusable; })) {
            plan.whole             = whole;
            plan.causal_conditions = causal_conditions_of(groups);
            return status;
        }
    }
}

// locked. Makes the plan with these groups; those that can't be bound are marked.
enum ggml_status neuron_planner::make(const ggml_cgraph * cgraph, neuron_groups & groups, neuron_plan & plan) {
    std::vector<neuron_candidate>  candidates = find_candidates(cgraph, kernels, groups);
    std::vector<neuron_mask_place> masks;
    const size_t                   masks_size   = neuron_place_masks(cgraph, candidates, masks);
    size_t                         scratch_size = masks_size;
    for (neuron_candidate & c : candidates) {
        if (c.group) {
            c.group_placement.place(core, locate, *c.group, masks_size);  // it was possible before
            scratch_size = std::max(scratch_size, c.group_placement.scratch());
            continue;
        }
        if (!c.selection) {
            continue;
        }
        neuron_place(core, locate, c.node(cgraph), masks, masks_size, c);
        if (!c.placement.message.empty()) {
            NEURON_ERROR("%s\n", c.placement.message.c_str());
            return GGML_STATUS_FAILED;
        }
        for (size_t & between : c.between) {
            between = c.placement.scratch;
            c.placement.scratch += c.attention ? GGML_PAD(c.attention->between(), NEURON_ALIGNMENT) : 0;
        }
        scratch_size = std::max(scratch_size, c.placement.scratch);
    }
    neuron_memory * scratch = nullptr;
    if (scratch_size) {
        scratch = core.scratch(scratch_size);
        if (!scratch) {
            return GGML_STATUS_ALLOC_FAILED;
        }
    }
    return bind_all(core, locate, scratch, cgraph, fusion, candidates, plan);
}
