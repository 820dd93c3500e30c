#include "plan/placement.h"

#include <algorithm>
#include <string>

static void locate_operands(const neuron_core & core,
                            neuron_locate_t     locate,
                            const ggml_tensor * node,
                            neuron_candidate &  c) {
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
static void lengthen_operands(neuron_candidate & c) {
    neuron_placement & p      = c.placement;
    const bool         padded = c.selection.rows() > c.selection.cut.n;
    for (int i = 0; i <= p.n_src; i++) {
        if (!p.home[i].size) {
            continue;
        }
        p.operands[i].size = neuron_nbytes(c.whole(i));
        p.shared[i]        = i < p.n_src && c.selection.pads(i);
        if (p.shared[i] || p.operands[i].size == p.home[i].size) {
            continue;
        }
        const bool reads_on = i < p.n_src && c.selection.cut.axis[i] < 0;
        if (reads_on && c.selection.cut.rule->mask >= 0) {
            p.home[i].size = p.operands[i].size;  // the cache goes on: has_room() has seen to it
            continue;
        }
        p.filled[i] = i < p.n_src && padded && c.selection.cut.axis[i] >= 0;
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
            !p.operands[i].size || !neuron_overlap(p.operands[i], result)) {
            continue;
        }
        p.moved[kernel.alias == NEURON_KERNELS_NO_ALIAS ? p.n_src : i] = true;
    }
}

// Nor does the runtime say what happens when a source that the kernel changes overlaps another operand.
static void check_updates(const ggml_tensor * node, const neuron_kernel & kernel, neuron_placement & p) {
    for (int i = 0; kernel.updates && i <= p.n_src; i++) {
        for (int u = 0; u < p.n_src; u++) {
            if (neuron_is_updated(kernel, u) && u != i && p.operands[i].memory &&
                neuron_overlap(p.operands[i], p.operands[u])) {
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
    if (!p.staged[i] || i == kernel.alias || neuron_is_updated(kernel, i)) {
        return i;
    }
    for (int same = 0; same < i; same++) {
        if (p.staged[same] && node->src[same] == node->src[i] && same != kernel.alias &&
            !neuron_is_updated(kernel, same)) {
            return same;
        }
    }
    return i;
}

// Gives scratch memory to what is staged or moved, and to masks that are made longer the place that they have.
static void take_scratch(const ggml_tensor *                    node,
                         const neuron_kernel &                  kernel,
                         const std::vector<neuron_mask_place> & masks,
                         neuron_placement &                     p,
                         int64_t                                n_more,
                         int64_t                                rows) {
    for (int i = 0; i <= p.n_src; i++) {
        if (p.shared[i]) {
            const auto mask = std::find_if(masks.begin(), masks.end(), [&](const neuron_mask_place & m) {
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

void neuron_place(const neuron_core &                    core,
                  neuron_locate_t                        locate,
                  const ggml_tensor *                    node,
                  const std::vector<neuron_mask_place> & masks,
                  size_t                                 scratch,
                  neuron_candidate &                     c) {
    neuron_placement & p = c.placement;
    p.n_src              = neuron_n_src(node);
    p.scratch            = scratch;
    locate_operands(core, locate, node, c);
    if (!p.message.empty()) {
        return;
    }
    if (!c.selection.is_exact()) {
        lengthen_operands(c);
    }
    keep_result_apart(node, c.first_kernel(), p);
    check_updates(node, c.first_kernel(), p);
    if (p.message.empty()) {
        take_scratch(node, c.first_kernel(), masks, p, c.selection.n_more, c.selection.rows());
    }
}

size_t neuron_place_masks(const ggml_cgraph *                   cgraph,
                          const std::vector<neuron_candidate> & candidates,
                          std::vector<neuron_mask_place> &      masks) {
    size_t     size  = 0;
    const auto place = [&](const ggml_tensor * mask, int64_t n_more, int64_t rows, size_t bytes) {
        const auto have = std::find_if(masks.begin(), masks.end(), [&](const neuron_mask_place & m) {
            return m.mask == mask && m.n_more == n_more && m.rows == rows;
        });
        if (have != masks.end()) {
            return have->offset;
        }
        masks.push_back({ mask, n_more, rows, size, bytes });
        size = GGML_PAD(size + bytes, NEURON_ALIGNMENT);
        return masks.back().offset;
    };
    for (const neuron_candidate & c : candidates) {
        for (size_t i = 0; c.group && i < c.group->slots.size(); i++) {
            neuron_group_slot & slot = c.group->slots[i];
            if (slot.mask) {
                slot.mask_offset = place(slot.mask, slot.room.columns, slot.room.rows, slot.room.size);
            }
        }
        const int src = c.selection.cut.rule ? c.selection.cut.rule->mask : -1;
        if (!c.selection || src < 0 || !c.selection.pads(src)) {
            continue;
        }
        place(c.node(cgraph)->src[src], c.selection.n_more, c.selection.rows(), neuron_nbytes(c.whole(src)));
    }
    return size;
}
