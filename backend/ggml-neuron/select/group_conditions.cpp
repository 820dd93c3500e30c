#include "select/group_conditions.h"

#include "select/kernel_store.h"
#include "select/key_nodes.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

bool neuron_group_conditions::can_rename(const neuron_group_fit & fit, const neuron_group & group) {
    for (size_t i = 0; i < group.slots.size(); i++) {
        const ggml_tensor * t = group.slots[i].tensor;
        if (fit.slots[i].named.n > 1 && (!neuron_can_read_rows(t) || is_changed(t))) {
            return false;
        }
    }
    return true;
}

// Returns the first row of a SET_ROWS's slot in the written tensor. It is not 0 for a sequence with its own cache.
static int64_t first_row_of(const ggml_tensor * node, const neuron_group & group) {
    const auto   slot  = std::find_if(group.slots.begin(), group.slots.end(), [node](const neuron_group_slot & s) {
        return s.written && s.tensor == neuron_root_of(node);
    });
    const size_t begin = neuron_offset_of(node);
    return node->op != GGML_OP_SET_ROWS || slot == group.slots.end() || slot->offset <= begin
               ? 0
               : (int64_t) ((slot->offset - begin) / node->nb[NEURON_SET_ROWS_AXIS]);
}

bool neuron_group_conditions::find_causal(const neuron_group_fit &          fit,
                                          const std::vector<neuron_range> & pieces,
                                          neuron_group &                    group) {
    group.causal_conditions.clear();
    for (const neuron_group_causal_condition & h : fit.causal_conditions) {
        const ggml_tensor * rows =
            cgraph->nodes[group.nodes[h.writer]]->src[neuron_group_causal_condition::ROWS_SOURCE];
        const ggml_tensor * mask = cgraph->nodes[group.nodes[h.reader]]->src[h.mask];
        if (unmet.causal || (streams && streams->part_of(rows)) || !neuron_can_tell_causality(rows, mask) ||
            is_changed(rows) || is_changed(mask)) {
            return false;
        }
        neuron_cell_map cells = h.cells;
        cells.offset -= first_row_of(cgraph->nodes[group.nodes[h.writer]], group) * (int64_t) cells.row_stride;
        group.causal_conditions.push_back({ rows, mask, cells, pieces });
    }
    return true;
}

// Calls a function with each node of a group whose kernel leaves out cells of the mask, until it returns false.
template <typename F>
bool neuron_group_conditions::for_each_hidden(const neuron_group_kernel & kernel,
                                              neuron_variant              variant,
                                              const neuron_group &        group,
                                              F                           use) const {
    if (!variant.causal) {
        return true;
    }
    const neuron_key key(kernel.key, kernel.n_words);
    for (size_t i = 0; i < group.nodes.size(); i++) {
        const neuron_causal_kernel causal(key.nodes[i]);
        const ggml_tensor *        node = cgraph->nodes[group.nodes[i]];
        if (causal.n_tokens && causal.leaves_out(node->src[NEURON_FLASH_ATTN_MASK]) && !use(node, causal)) {
            return false;
        }
    }
    return true;
}

bool neuron_group_conditions::may_leave_out(const neuron_group_kernel & kernel,
                                            neuron_variant              variant,
                                            const neuron_group &        group) {
    return for_each_hidden(kernel, variant, group, [this](const ggml_tensor * node, const neuron_causal_kernel &) {
        const ggml_tensor * mask = node->src[NEURON_FLASH_ATTN_MASK];
        return !unmet.hidden && neuron_can_read_mask(mask) && !is_changed(mask);
    });
}

void neuron_group_conditions::add_hidden(const neuron_group_kernel & kernel,
                                         neuron_variant              variant,
                                         neuron_range                range,
                                         neuron_group &              group) const {
    for_each_hidden(kernel, variant, group, [&](const ggml_tensor * node, const neuron_causal_kernel & causal) {
        const neuron_range tokens = range.n ? range : neuron_range{ 0, node->src[0]->ne[1] };
        group.hidden_conditions.push_back({ node->src[NEURON_FLASH_ATTN_MASK], tokens, causal });
        return true;
    });
}

bool neuron_group_conditions::find_rows(const neuron_kernel & kernel, neuron_group & group) {
    size_t           n_words;
    const uint64_t * words = neuron_kernels_key(kernel.bundle->handle, kernel.number, &n_words);
    const neuron_key key(words, n_words);
    group.row_conditions.clear();
    for (neuron_group_slot & slot : group.slots) {
        slot.first = 0;
    }
    for (size_t i = 0; i < group.nodes.size(); i++) {
        const ggml_tensor * node  = cgraph->nodes[group.nodes[i]];
        const auto          n     = (int64_t) key.nodes[i].tensor[1 + NEURON_SET_ROWS_AXIS];
        const int64_t       first = first_row_of(node, group);
        const ggml_tensor * own =
            node->op == GGML_OP_SET_ROWS ? node->src[neuron_group_causal_condition::ROWS_SOURCE] : nullptr;
        const neuron_stream_part * part = streams ? streams->part_of(own) : nullptr;
        if (part) {
            group.row_conditions.push_back({
                part->whole, part->first, n, { part->begin, part->n }
            });
            continue;
        }
        if (!own || (!first && n >= node->ne[NEURON_SET_ROWS_AXIS])) {
            continue;
        }
        if (unmet.rows || !neuron_can_read_rows(own) || is_changed(own) || !count_from(first, own, group)) {
            return false;
        }
        group.row_conditions.push_back({ own, first, n });
    }
    return true;
}

// Makes a slot of row numbers count from row `first`. Returns false when the numbers do not fill a slot, or when
// another node uses them unchanged.
bool neuron_group_conditions::count_from(int64_t first, const ggml_tensor * rows, neuron_group & group) const {
    for (const int i : group.nodes) {
        const ggml_tensor * node = cgraph->nodes[i];
        for (int s = 0; s < neuron_n_src(node); s++) {
            const ggml_tensor * t = node->src[s];
            if (t && neuron_root_of(t) == neuron_root_of(rows) && first &&
                (t->view_src || first_row_of(node, group) != first)) {
                return false;
            }
        }
    }
    for (neuron_group_slot & slot : group.slots) {
        slot.first = slot.tensor == rows ? first : slot.first;
    }
    return true;
}

// Returns whether the graph computes or changes a tensor.
bool neuron_group_conditions::is_changed(const ggml_tensor * t) {
    if (changed.empty()) {
        for (const int i : work) {
            changed.insert(neuron_root_of(cgraph->nodes[i]));
        }
    }
    return changed.count(neuron_root_of(t)) != 0;
}
