#include "plan.h"

#include "../bundle/src/hash.h"
#include "../bundle/src/key.h"
#include "chains.h"
#include "group_plan.h"
#include "log.h"
#include "record.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

// Nodes in all plans that a backend keeps.
static constexpr size_t MAX_PLANNED_NODES = 1 << 16;

bool neuron_is_on_device(const neuron_planned_node & planned) {
    return planned.group || !planned.steps.empty() || planned.later || neuron_is_zero(planned.node);
}

//
// placing operands
//

namespace {

// Where the operands of one node are for its kernels: those in device memory where they are, the others in the core's scratch
// memory, which every node of a graph uses from the same place on.
struct neuron_placement {
    neuron_operand operands[GGML_MAX_SRC + 1];     // sources, then the result; memory NULL stands for scratch memory
    neuron_operand home[GGML_MAX_SRC + 1];         // where the node's own really are, without what kernels have besides
    bool           staged[GGML_MAX_SRC + 1] = {};  // from or to host memory
    bool        moved[GGML_MAX_SRC + 1]  = {};  // to keep it apart from the result, or because the kernel has more rows
    bool        filled[GGML_MAX_SRC + 1] = {};  // rows that the node does not have are copies of those that it has
    bool        shared[GGML_MAX_SRC + 1] = {};  // made once for all nodes that have it
    int         n_src                    = 0;
    size_t      scratch                  = 0;   // bytes
    std::string message;                        // why it can't be; empty when it can
};

// A mask made longer, by what it depends on.
struct long_mask {
    const ggml_tensor * mask;
    int64_t             n_more;
    int64_t             rows;
    size_t              offset;  // in scratch memory
    size_t              size;
};

// A node that has to be computed, or a group of nodes, and what computes it.
struct candidate {
    int                    index = 0;  // in cgraph->nodes, of a group's last
    neuron_service         service;
    neuron_signature       signature;
    neuron_placement       placement;
    neuron_group *         group = nullptr;
    neuron_group_placement group_placement;

    std::shared_ptr<neuron_chain> chain;               // that it ends: signature and placement are the whole chain's
    size_t                        between[2] = {};     // where in scratch memory results between its nodes are, in turn
    bool                          later      = false;  // computed with the last node of its chain
};

}  // namespace

static bool overlap(const neuron_operand & a, const neuron_operand & b) {
    return a.memory == b.memory && a.offset < b.offset + b.size && b.offset < a.offset + a.size;
}

// Returns the node, or its chain as one.
static const ggml_tensor * node_of(const ggml_cgraph * cgraph, const candidate & c) {
    return c.chain ? &c.chain->whole : cgraph->nodes[c.index];
}

static const neuron_kernel & first_kernel(const candidate & c) {
    return c.service.pieces.front().kernel;
}

static bool is_updated(const neuron_kernel & kernel, int src) {
    return kernel.updates >> src & 1;
}

// Returns a tensor of a node as the kernels together have it.
static neuron_kernels_tensor whole_of(const candidate & c, int i) {
    return c.service.cut.piece(c.signature, i, c.service.rows(), c.service.n_more);
}

static void locate_operands(const neuron_core & core, neuron_locate_t locate, const ggml_tensor * node, candidate & c) {
    neuron_placement & p = c.placement;
    for (int i = 0; i <= p.n_src; i++) {
        const ggml_tensor * t = i < p.n_src ? node->src[i] : node;
        if (!t) {
            continue;
        }
        if (!locate(core, t, p.home[i])) {
            p.message = std::string("a tensor of ") + ggml_op_desc(node) + ", " + t->name +
                        ", is neither on this NeuronCore nor in host memory";
            return;
        }
        p.staged[i]   = !p.home[i].memory;
        p.operands[i] = p.home[i];
    }
}

// Gives operands the sizes that kernels for other numbers of tokens, or longer caches, have.
static void lengthen_operands(candidate & c) {
    neuron_placement & p      = c.placement;
    const bool         padded = c.service.rows() > c.service.cut.n;
    for (int i = 0; i <= p.n_src; i++) {
        if (!p.home[i].size) {
            continue;
        }
        p.operands[i].size = neuron_nbytes(whole_of(c, i));
        p.shared[i]        = i < p.n_src && c.service.pads(i);
        if (p.shared[i] || p.operands[i].size == p.home[i].size) {
            continue;
        }
        const bool reads_on = i < p.n_src && c.service.cut.axis[i] < 0;
        if (reads_on && c.service.cut.rule->mask >= 0) {
            p.home[i].size = p.operands[i].size;  // the cache goes on: has_room() has seen to it
            continue;
        }
        p.filled[i] = i < p.n_src && padded && c.service.cut.axis[i] >= 0;
        p.moved[i]  = !p.staged[i];
    }
}

// Moves operands so that the result overlaps no source but the one whose memory it shares.
static void keep_result_apart(const ggml_tensor * node, const neuron_kernel & kernel, neuron_placement & p) {
    // The scheduler copies sources that another backend computed. When it copied an in-place node's destination, the result
    // still belongs where the original is.
    if (kernel.alias != NEURON_KERNELS_NO_ALIAS && node->src[kernel.alias]->data != node->data) {
        for (const int i : { kernel.alias, p.n_src }) {
            p.moved[i] = !p.staged[i];
        }
    }
    // The runtime does not say what happens when a kernel's result overlaps an input, which ggml's allocator arranges for
    // ops that it knows to be safe elementwise. (graph_optimize keeps it from doing so where a scheduler is used.)
    const neuron_operand & result = p.operands[p.n_src];
    for (int i = 0; i < p.n_src; i++) {
        if (i == kernel.alias || p.staged[i] || p.staged[p.n_src] || p.moved[i] || p.moved[p.n_src] || p.shared[i] ||
            !p.operands[i].size || !overlap(p.operands[i], result)) {
            continue;
        }
        p.moved[kernel.alias == NEURON_KERNELS_NO_ALIAS ? p.n_src : i] = true;
    }
}

// Nor does the runtime say what happens when a source that the kernel changes overlaps another operand.
static void check_updates(const ggml_tensor * node, const neuron_kernel & kernel, neuron_placement & p) {
    for (int i = 0; kernel.updates && i <= p.n_src; i++) {
        for (int u = 0; u < p.n_src; u++) {
            if (is_updated(kernel, u) && u != i && p.operands[i].memory && overlap(p.operands[i], p.operands[u])) {
                p.message = std::string(ggml_op_desc(node)) + " changes " + node->src[u]->name +
                            ", which overlaps another of its tensors";
                return;
            }
        }
    }
}

// Returns the first source that can share operand i's scratch memory, or i: a source that is given twice is copied once,
// unless the result takes the place of one of the two.
static int shared_with(const ggml_tensor * node, const neuron_kernel & kernel, const neuron_placement & p, int i) {
    if (i == p.n_src) {
        return kernel.alias == NEURON_KERNELS_NO_ALIAS ? i : kernel.alias;
    }
    if (!p.staged[i] || i == kernel.alias || is_updated(kernel, i)) {
        return i;
    }
    for (int same = 0; same < i; same++) {
        if (p.staged[same] && node->src[same] == node->src[i] && same != kernel.alias && !is_updated(kernel, same)) {
            return same;
        }
    }
    return i;
}

// Gives scratch memory to what is staged or moved, and to masks that are made longer the place that they have.
static void take_scratch(const ggml_tensor *            node,
                         const neuron_kernel &          kernel,
                         const std::vector<long_mask> & masks,
                         neuron_placement &             p,
                         int64_t                        n_more,
                         int64_t                        rows) {
    for (int i = 0; i <= p.n_src; i++) {
        if (p.shared[i]) {
            const auto mask = std::find_if(masks.begin(), masks.end(), [&](const long_mask & m) {
                return m.mask == node->src[i] && m.n_more == n_more && m.rows == rows;
            });
            p.operands[i]   = { nullptr, mask->offset, mask->size };
            continue;
        }
        if (!p.staged[i] && !p.moved[i]) {
            continue;
        }
        const int same = shared_with(node, kernel, p, i);
        if (same != i) {
            p.operands[i] = p.operands[same];
            continue;
        }
        p.operands[i] = { nullptr, p.scratch, p.operands[i].size };
        p.scratch     = GGML_PAD(p.scratch + p.operands[i].size, NEURON_ALIGNMENT);
    }
}

// Places the operands of a node, whose own scratch memory begins at `scratch`.
static void place(const neuron_core &            core,
                  neuron_locate_t                locate,
                  const ggml_tensor *            node,
                  const std::vector<long_mask> & masks,
                  size_t                         scratch,
                  candidate &                    c) {
    neuron_placement & p = c.placement;
    p.n_src              = neuron_n_src(node);
    p.scratch            = scratch;
    locate_operands(core, locate, node, c);
    if (!p.message.empty()) {
        return;
    }
    if (!c.service.is_exact()) {
        lengthen_operands(c);
    }
    keep_result_apart(node, first_kernel(c), p);
    check_updates(node, first_kernel(c), p);
    if (p.message.empty()) {
        take_scratch(node, first_kernel(c), masks, p, c.service.n_more, c.service.rows());
    }
}

//
// binding kernels
//

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
static void fill_rows(const candidate & c, int i, const neuron_operand & operand, std::vector<neuron_move> & moves) {
    const neuron_kernels_tensor & t    = c.signature.tensors[i];
    const int                     axis = c.service.cut.axis[i];
    const size_t own = neuron_nbytes(c.service.cut.piece(c.signature, i, c.service.cut.n, c.service.n_more));
    neuron_repeat_rows(operand, own, (size_t) c.service.cut.n * t.nb[axis], moves);
}

// Adds the copies around a node's kernels, whose operands are bound.
static void add_copies(neuron_planned_node &  planned,
                       const ggml_tensor *    node,
                       const candidate &      c,
                       const neuron_operand * operands) {
    const neuron_placement & p      = c.placement;
    const neuron_kernel &    kernel = first_kernel(c);
    const auto               own    = [&](int i) {  // without what kernels have besides
        return neuron_operand{ operands[i].memory, operands[i].offset, p.home[i].size };
    };
    for (int i = 0; i < p.n_src; i++) {
        const auto same_place = [&](const neuron_upload & u) {
            return u.to.offset == operands[i].offset;
        };
        if (p.shared[i]) {
            planned.masks.push_back({ node->src[i], p.home[i], operands[i], c.service.n_more, c.service.rows() });
        } else if (p.staged[i]) {
            if (is_updated(kernel, i)) {
                planned.downloads.push_back({ operands[i], node->src[i] });
            }
            if (std::any_of(planned.uploads.begin(), planned.uploads.end(), same_place)) {
                continue;
            }
            planned.uploads.push_back({ own(i), node->src[i] });
        } else if (p.moved[i]) {
            planned.before.push_back({ p.home[i], own(i) });
        }
        if (p.filled[i]) {
            fill_rows(c, i, operands[i], planned.before);
        }
    }
    const int result = p.n_src;
    if (p.staged[result]) {
        planned.downloads.push_back({ own(result), planned.node });
    } else if (p.moved[result]) {
        planned.after.push_back({ own(result), p.home[result] });
    }
}

// Sets the operands of one piece: the parts of those of the whole node.
static void cut_operands(const candidate &      c,
                         const neuron_piece &   piece,
                         const neuron_operand * operands,
                         neuron_operand *       parts) {
    for (int i = 0; i <= c.placement.n_src; i++) {
        parts[i]       = operands[i];
        const int axis = c.service.cut.axis[i];
        if (axis < 0 || !operands[i].size) {
            continue;
        }
        parts[i].offset += (size_t) piece.range.first * whole_of(c, i).nb[axis];
        parts[i].size = neuron_nbytes(c.service.cut.piece(c.signature, i, piece.range.n, c.service.n_more));
    }
}

// locked. Adds a kernel that is bound; returns whether it could be.
static bool bind_step(neuron_core &                core,
                      const neuron_kernel &        kernel,
                      const neuron_operand *       operands,
                      size_t                       n_src,
                      std::vector<neuron_step *> & steps,
                      std::string &                message,
                      bool &                       broken) {
    neuron_step * step = core.bind(kernel, { operands, n_src, 1, kernel.updates, nullptr }, message, broken);
    if (step) {
        steps.push_back(step);
    }
    return step != nullptr;
}

// locked. Adds the kernels of one piece of a chain; `parts` are the operands of the whole.
static bool bind_chain(neuron_core &                core,
                       neuron_memory *              scratch,
                       const candidate &            c,
                       const neuron_chain_piece &   piece,
                       const neuron_operand *       parts,
                       std::vector<neuron_step *> & steps,
                       std::string &                message,
                       bool &                       broken) {
    const neuron_chain & chain = *c.chain;
    neuron_operand       previous{};
    for (size_t k = 0; k < chain.nodes.size(); k++) {
        const neuron_chain_node & node   = chain.nodes[k];
        const int                 result = node.signature.n_src;
        neuron_operand            operands[GGML_MAX_SRC + 1];
        for (int i = 0; i < result; i++) {
            operands[i] = node.sources[i] >= 0                             ? parts[node.sources[i]]
                          : node.sources[i] == neuron_chain_node::PREVIOUS ? previous
                                                                           : neuron_operand{};
        }
        const size_t size = neuron_nbytes(chain.piece(node, result, piece.range.n, chain.n_more));
        operands[result] =
            k + 1 == chain.nodes.size() ? parts[c.placement.n_src] : neuron_operand{ scratch, c.between[k % 2], size };
        if (!bind_step(core, piece.kernels[k], operands, (size_t) result, steps, message, broken)) {
            return false;
        }
        previous = operands[result];
    }
    return true;
}

// locked
static neuron_planned_node bind_node(neuron_core &     core,
                                     neuron_memory *   scratch,
                                     ggml_tensor *     node,
                                     const candidate & c,
                                     bool &            whole) {
    neuron_planned_node planned;
    planned.index = c.index;
    planned.node  = node;
    planned.data  = node->data;
    planned.later = c.later;
    if (!c.service) {
        return planned;
    }
    neuron_operand operands[GGML_MAX_SRC + 1];
    neuron_operand parts[GGML_MAX_SRC + 1];
    for (int i = 0; i <= c.placement.n_src; i++) {
        operands[i] = c.placement.operands[i];
        if (!operands[i].memory && operands[i].size) {
            operands[i].memory = scratch;
        }
    }
    for (size_t k = 0; k < c.service.pieces.size(); k++) {
        const neuron_piece & piece = c.service.pieces[k];
        std::string          message;
        bool                 broken = false;
        if (!c.service.is_exact()) {
            cut_operands(c, piece, operands, parts);
        }
        const bool bound = c.chain
                               ? bind_chain(core, scratch, c, c.chain->pieces[k], parts, planned.steps, message, broken)
                               : bind_step(core, piece.kernel, c.service.is_exact() ? operands : parts,
                                           (size_t) c.placement.n_src, planned.steps, message, broken);
        if (!bound) {
            NEURON_WARN("%s; computing %s on the CPU%s\n", message.c_str(), ggml_op_desc(node),
                        broken ? "" : " this time");
            whole = whole && broken;
            planned.steps.clear();
            return planned;
        }
    }
    planned.cut = !c.service.is_exact();
    for (const neuron_piece & piece : c.service.pieces) {
        planned.padding += planned.cut ? piece.range.n : 0;
    }
    planned.padding -= c.service.cut.n;
    add_copies(planned, c.chain ? &c.chain->whole : node, c, operands);
    return planned;
}

// locked. Binds a group, or marks it as one that can't be.
static neuron_planned_node bind_group(neuron_core &       core,
                                      neuron_locate_t     locate,
                                      neuron_memory *     scratch,
                                      const ggml_cgraph * cgraph,
                                      neuron_fusion &     fusion,
                                      const candidate &   c,
                                      bool &              whole) {
    neuron_planned_node planned;
    std::string         message;
    bool                broken = false;
    planned.index              = c.index;
    planned.node               = cgraph->nodes[c.index];
    planned.data               = planned.node->data;
    planned.group              = c.group_placement.bind(core, fusion, scratch, cgraph, *c.group, message, broken);
    if (!planned.group) {
        NEURON_WARN("%s; computing its %zu nodes one by one%s\n", message.c_str(), c.group->nodes.size(),
                    broken ? "" : " this time");
        whole             = whole && broken;
        c.group->unusable = true;
        return planned;
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
    return planned;
}

// Lets only the first node of those with the same mask make it.
static void share_masks(neuron_plan & plan) {
    std::vector<size_t> made;  // by offset in scratch memory
    for (neuron_planned_node & planned : plan.nodes) {
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
static enum ggml_status bind_all(neuron_core &                  core,
                                 neuron_locate_t                locate,
                                 neuron_memory *                scratch,
                                 const ggml_cgraph *            cgraph,
                                 neuron_fusion &                fusion,
                                 const std::vector<candidate> & candidates,
                                 neuron_plan &                  plan) {
    // Binding may destroy older steps, and the ones of this plan with them: then once more, from the beginning.
    for (int attempt = 0; attempt < 2; attempt++) {
        plan.epoch         = core.epoch;
        plan.n_graph_nodes = cgraph->n_nodes;
        plan.whole         = true;
        plan.nodes.clear();
        plan.nodes.reserve(candidates.size());
        for (const candidate & c : candidates) {
            if (c.group) {
                plan.nodes.push_back(bind_group(core, locate, scratch, cgraph, fusion, c, plan.whole));
                continue;
            }
            plan.nodes.push_back(bind_node(core, scratch, cgraph->nodes[c.index], c, plan.whole));
            if (c.chain && plan.nodes.back().steps.empty()) {
                // each by the CPU, in their order
                for (size_t i = plan.nodes.size() - c.chain->nodes.size(); i < plan.nodes.size(); i++) {
                    plan.nodes[i].later = false;
                }
            }
        }
        if (plan.epoch == core.epoch) {
            share_masks(plan);
            return GGML_STATUS_SUCCESS;
        }
    }
    NEURON_ERROR("a graph of %d nodes is larger than can be bound at once\n", cgraph->n_nodes);
    return GGML_STATUS_FAILED;
}

// Gives the masks that nodes and groups need longer their places in scratch memory, from its beginning; returns how much they
// take.
static size_t place_masks(const ggml_cgraph *            cgraph,
                          const std::vector<candidate> & candidates,
                          std::vector<long_mask> &       masks) {
    size_t     size  = 0;
    const auto place = [&](const ggml_tensor * mask, int64_t n_more, int64_t rows, size_t bytes) {
        const auto have = std::find_if(masks.begin(), masks.end(), [&](const long_mask & m) {
            return m.mask == mask && m.n_more == n_more && m.rows == rows;
        });
        if (have != masks.end()) {
            return have->offset;
        }
        masks.push_back({ mask, n_more, rows, size, bytes });
        size = GGML_PAD(size + bytes, NEURON_ALIGNMENT);
        return masks.back().offset;
    };
    for (const candidate & c : candidates) {
        for (size_t i = 0; c.group && i < c.group->slots.size(); i++) {
            neuron_group_slot & slot = c.group->slots[i];
            if (slot.mask) {
                slot.mask_offset = place(slot.mask, slot.room.columns, slot.room.rows, slot.room.size);
            }
        }
        const int src = c.service.cut.rule ? c.service.cut.rule->mask : -1;
        if (!c.service || src < 0 || !c.service.pads(src)) {
            continue;
        }
        place(node_of(cgraph, c)->src[src], c.service.n_more, c.service.rows(), neuron_nbytes(whole_of(c, src)));
    }
    return size;
}

// Returns whether the last candidates are a chain's nodes, of which nobody else sees what is between them.
static bool is_whole_chain(const ggml_cgraph *            cgraph,
                           const std::vector<candidate> & candidates,
                           const neuron_chain &           chain) {
    const size_t n = chain.nodes.size();
    for (size_t k = 0; k < n; k++) {
        if (candidates.size() < n) {
            return false;
        }
        const candidate &   c    = candidates[candidates.size() - n + k];
        const ggml_tensor * node = cgraph->nodes[c.index];
        if (node != chain.nodes[k].node || c.group || c.chain || c.later) {
            return false;
        }
        const bool seen = (node->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(cgraph, c.index) != 1;
        if (seen && k + 1 < n) {
            return false;
        }
    }
    // what the last one reads is a view
    const ggml_tensor * view = chain.nodes.back().node->src[0];
    const size_t        at   = ggml_hash_find(&cgraph->visited_hash_set, view);
    return !(view->flags & GGML_TENSOR_FLAG_OUTPUT) && at != GGML_HASHSET_FULL &&
           ggml_bitset_get(cgraph->visited_hash_set.used, at) && cgraph->use_counts[at] == 1;
}

// Lets a chain that the last candidate ends be computed as one, where a node of it has no kernel for itself.
static void find_chain(const neuron_kernel_store & kernels,
                       const ggml_cgraph *         cgraph,
                       std::vector<candidate> &    candidates) {
    candidate &         last  = candidates.back();
    const ggml_tensor * node  = cgraph->nodes[last.index];
    const auto          chain = neuron_ends_chain(node) ? neuron_chain_to(node, false) : nullptr;
    if (!chain || !is_whole_chain(cgraph, candidates, *chain)) {
        return;
    }
    const auto begin = candidates.end() - (std::ptrdiff_t) chain->nodes.size();
    const bool alone = std::all_of(begin, candidates.end(), [](const candidate & c) { return (bool) c.service; });
    if (alone || !kernels.serve(*chain)) {
        return;
    }
    for (auto c = begin; c != candidates.end(); ++c) {
        c->service = {};
        c->later   = &*c != &last;
    }
    last.chain          = chain;
    last.signature      = chain->signature;
    last.service.cut    = chain->cut;
    last.service.n_more = chain->n_more;
    for (const neuron_chain_piece & piece : chain->pieces) {
        last.service.pieces.push_back({ piece.kernels.back(), piece.range });
    }
}

// Returns what computes the nodes of a graph that are in no group, and the groups, in the order of the graph.
static std::vector<candidate> find_candidates(const ggml_cgraph *         cgraph,
                                              const neuron_kernel_store & kernels,
                                              neuron_groups &             groups) {
    std::vector<candidate> candidates;
    auto                   group = groups.groups.begin();
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (!neuron_is_work(node)) {
            continue;
        }
        if (group != groups.groups.end() && group->first() == i) {
            candidate c;
            c.index = group->last();
            c.group = &*group;
            candidates.push_back(std::move(c));
            i = group->last();
            ++group;
            continue;
        }
        candidate c;
        c.index   = i;
        c.service = kernels.serve(node);
        if (c.service && !c.service.is_exact()) {
            c.signature = neuron_signature_of(node);
        }
        candidates.push_back(std::move(c));
        find_chain(kernels, cgraph, candidates);
    }
    for (const candidate & c : candidates) {
        if (!c.service && !c.group && !c.later && !neuron_is_zero(cgraph->nodes[c.index])) {
            neuron_note_missing(cgraph->nodes[c.index]);
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

// Returns what has to be hidden for groups to be computed in pieces, each once: layers have it in common.
static std::vector<neuron_hiding> hidings_of(const neuron_groups & groups) {
    std::vector<neuron_hiding> all;
    for (const neuron_group & group : groups.groups) {
        for (const neuron_hiding & h : group.hidings) {
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
        groups = neuron_find_groups(cgraph, kernels, neuron_is_watched(cgraph), in_order);
        for (const auto & [node, reason] : groups.outside) {
            plan.outside[reason]++;
        }
        take_out(groups, NEURON_UNGROUPED_KERNEL, plan, [this](const neuron_group & group) {
            const std::vector<neuron_kernel> all = group.kernels();
            return std::any_of(all.begin(), all.end(),
                               [this](const neuron_kernel & kernel) { return core.is_broken_locked(kernel); });
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
            plan.whole   = whole;
            plan.hidings = hidings_of(groups);
            return status;
        }
    }
}

// locked. Makes the plan with these groups; those that can't be bound are marked.
enum ggml_status neuron_planner::make(const ggml_cgraph * cgraph, neuron_groups & groups, neuron_plan & plan) {
    std::vector<candidate> candidates = find_candidates(cgraph, kernels, groups);
    std::vector<long_mask> masks;
    const size_t           masks_size   = place_masks(cgraph, candidates, masks);
    size_t                 scratch_size = masks_size;
    for (candidate & c : candidates) {
        if (c.group) {
            c.group_placement.place(core, locate, *c.group, masks_size);  // it was possible before
            scratch_size = std::max(scratch_size, c.group_placement.scratch());
            continue;
        }
        if (!c.service) {
            continue;
        }
        place(core, locate, node_of(cgraph, c), masks, masks_size, c);
        if (!c.placement.message.empty()) {
            NEURON_ERROR("%s\n", c.placement.message.c_str());
            return GGML_STATUS_FAILED;
        }
        for (size_t & between : c.between) {
            between = c.placement.scratch;
            c.placement.scratch += c.chain ? GGML_PAD(c.chain->between(), NEURON_ALIGNMENT) : 0;
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

//
// keeping plans
//

// Returns a number that tells graphs without a uid apart: everything that a plan depends on goes into it.
static uint64_t fingerprint(const ggml_cgraph * cgraph) {
    nk::word_hash h;
    const auto    add_tensor = [&h](const ggml_tensor * t) {
        h.add((uint64_t) (uintptr_t) t);
        h.add((uint64_t) (uintptr_t) t->data);
        h.add((uint64_t) (uintptr_t) t->view_src);
        h.add((uint64_t) (uintptr_t) (t->view_src ? t->view_src->buffer : t->buffer));
        h.add((uint64_t) t->type);
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            h.add((uint64_t) t->ne[i]);
            h.add(t->nb[i]);
        }
    };
    h.add((uint64_t) cgraph->n_nodes);
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        // what is seen outside of a group depends on them, also where the same nodes are part of another graph
        h.add((uint64_t) node->flags);
        h.add((uint64_t) neuron_uses_in_graph(cgraph, node));
        if (!neuron_is_work(node)) {
            h.add(0);
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

// Forgets the plans that were not used for longest, until half the room is free.
void neuron_planner::forget() {
    std::vector<uint64_t> ages;
    for (const auto * plans : { &by_uid[0], &by_uid[1], &by_content[0], &by_content[1] }) {
        for (const auto & entry : *plans) {
            ages.push_back(entry.second.last_used);
        }
    }
    std::nth_element(ages.begin(), ages.begin() + ages.size() / 2, ages.end());
    const uint64_t limit = ages[ages.size() / 2];
    n_planned            = 0;
    for (auto * plans : { &by_uid[0], &by_uid[1], &by_content[0], &by_content[1] }) {
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
    // what a fingerprint tells of graphs without a uid
    return !cgraph->uid ||
           std::all_of(plan.nodes.begin(), plan.nodes.end(), [cgraph](const neuron_planned_node & planned) {
               const auto is_same = [cgraph](const auto & p) {
                   return cgraph->nodes[p.index] == p.node && p.node->data == p.data;
               };
               return planned.group ? std::all_of(planned.group->members.begin(), planned.group->members.end(), is_same)
                                    : is_same(planned);
           });
}

// locked. Sets `plan` to the graph's of one of the two kinds that are kept.
enum ggml_status neuron_planner::keep(const ggml_cgraph * cgraph, bool in_order, neuron_plan *& found) {
    if (n_planned > MAX_PLANNED_NODES) {
        forget();
    }
    neuron_plan & plan = cgraph->uid ? by_uid[in_order][cgraph->uid] : by_content[in_order][fingerprint(cgraph)];
    if (plan.last_used == 0) {
        n_planned++;  // graphs of views alone count, too
    }
    plan.last_used = ++clock;
    found          = &plan;
    if (is_valid(cgraph, plan)) {
        return GGML_STATUS_SUCCESS;
    }
    n_planned -= plan.nodes.size();
    const enum ggml_status status = make(cgraph, in_order, plan);
    if (status != GGML_STATUS_SUCCESS) {
        plan.epoch = 0;
        plan.nodes.clear();
        plan.hidings.clear();
    }
    n_planned += plan.nodes.size();
    return status;
}

// locked. Sets `hidden` to whether everything is that has to be hidden for a plan.
enum ggml_status neuron_planner::check(const neuron_plan & plan, bool & hidden) const {
    std::unordered_map<const ggml_tensor *, std::vector<uint8_t>>
        data;  // layers have masks and numbers of rows in common
    for (const neuron_hiding & h : plan.hidings) {
        for (const ggml_tensor * t : { h.rows, h.mask }) {
            if (data.count(t)) {
                continue;
            }
            neuron_operand where;
            if (!locate(core, t, where)) {
                return GGML_STATUS_FAILED;
            }
            std::vector<uint8_t> & bytes = data[t];
            bytes.resize(where.size);
            if (!where.memory) {
                memcpy(bytes.data(), t->data, bytes.size());
            } else if (where.memory->read_locked(bytes.data(), where.offset, bytes.size()) != NRT_SUCCESS) {
                return GGML_STATUS_FAILED;
            }
        }
        if (!neuron_is_hidden(h, data.at(h.rows).data(), data.at(h.mask).data())) {
            hidden = false;
            return GGML_STATUS_SUCCESS;
        }
    }
    hidden = true;
    return GGML_STATUS_SUCCESS;
}

enum ggml_status neuron_planner::get(const ggml_cgraph * cgraph, const neuron_plan ** found) {
    neuron_plan *    plan   = nullptr;
    enum ggml_status status = keep(cgraph, false, plan);
    *found                  = plan;
    if (status != GGML_STATUS_SUCCESS || plan->hidings.empty()) {
        return status;
    }
    bool hidden = false;
    status      = check(*plan, hidden);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    // while it waited for what it reads, memory may have been freed
    if (!hidden || plan->epoch != core.epoch) {
        status = keep(cgraph, !hidden, plan);
        *found = plan;
    }
    return status;
}
