#include "plan/group_plan.h"

#include <algorithm>

bool neuron_group_placement::overlap(const operand & a, const operand & b) {
    return a.begin() < b.begin() + b.home.size && b.begin() < a.begin() + a.home.size;
}

void neuron_group_placement::take_scratch(operand & o) {
    o.where = { nullptr, end, o.where.size };
    end     = GGML_PAD(end + o.where.size, NEURON_ALIGNMENT);
}

// Adds a stretch of a tensor's memory, of which the kernel has `in_kernel` bytes: in scratch memory when that is more.
bool neuron_group_placement::add(const neuron_core & core,
                                 neuron_locate_t     locate,
                                 ggml_tensor *       t,
                                 size_t              offset,
                                 size_t              size,
                                 size_t              in_kernel) {
    operand o{};
    if (offset + size > ggml_nbytes(t) || !locate(core, t, o.home)) {
        return false;
    }
    if (o.home.size != ggml_nbytes(t)) {  // a weight in a layout of another size, which kernels read whole
        if (size != ggml_nbytes(t)) {
            return false;
        }
        size = in_kernel = o.home.size;
    }
    o.tensor    = t;
    o.offset    = offset;
    o.home.size = size;
    o.home.offset += offset;
    o.where      = o.home;
    o.where.size = in_kernel;
    if (!o.home.memory || in_kernel > size) {
        take_scratch(o);
    }
    operands.push_back(o);
    return true;
}

bool neuron_group_placement::add_slot(const neuron_core &       core,
                                      neuron_locate_t           locate,
                                      const neuron_group_slot & slot) {
    const neuron_group_room & room = slot.room;
    // where the cache goes on, it has what the kernel has
    const size_t              size = room.kind == neuron_group_room::CELLS ? room.size : slot.size;
    const size_t              rows = room.kind == neuron_group_room::ROWS ? room.size : size;
    if (!add(core, locate, slot.root, slot.offset, size, rows)) {
        return false;
    }
    operand & o = operands.back();
    o.slot      = &slot;
    o.written   = slot.written;
    if (room.kind == neuron_group_room::MASK) {
        o.where = { nullptr, slot.mask_offset, room.size };
    }
    return true;
}

// What a kernel changes must belong to no other tensor of the group: the order of reads and writes within a launch is the kernel's own.
bool neuron_group_placement::check_slots() const {
    return std::none_of(operands.begin(), operands.end(), [this](const operand & written) {
        return written.written && std::any_of(operands.begin(), operands.end(), [&](const operand & other) {
                   return &other != &written && overlap(written, other);
               });
    });
}

// Moves results that lie where the kernel reads, which graph_optimize prevents where a scheduler is used. Results on top of each
// other are those of nodes that no other node uses; only computing them in turn leaves what ggml would.
bool neuron_group_placement::keep_results_apart(size_t n_slots) {
    for (size_t i = n_slots; i < operands.size(); i++) {
        for (size_t j = n_slots; j < i; j++) {
            if (overlap(operands[i], operands[j])) {
                return false;
            }
        }
        for (size_t j = 0; j < n_slots; j++) {
            if (!overlap(operands[i], operands[j])) {
                continue;
            }
            if (operands[j].written) {
                return false;
            }
            if (operands[i].where.memory) {
                take_scratch(operands[i]);
            }
        }
    }
    return true;
}

bool neuron_group_placement::place(const neuron_core &  core,
                                   neuron_locate_t      locate,
                                   const neuron_group & group,
                                   size_t               begin) {
    operands.clear();
    end = begin;
    for (const neuron_group_slot & slot : group.slots) {
        if (!add_slot(core, locate, slot)) {
            return false;
        }
    }
    if (!check_slots()) {
        return false;
    }
    for (const neuron_group_result & result : group.results) {
        if (!add(core, locate, result.tensor, 0, ggml_nbytes(result.tensor), result.size)) {
            return false;
        }
    }
    return keep_results_apart(group.slots.size());
}

// Adds the copies around a launch that an operand needs.
void neuron_group_placement::add_copies(const operand &        o,
                                        const neuron_operand & bound,
                                        neuron_planned &       planned) const {
    const neuron_operand own = { bound.memory, bound.offset, o.home.size };  // without what the kernel has besides
    if (o.slot && o.slot->room.kind == neuron_group_room::MASK) {
        return;                                                              // made for all that have it
    }
    if (!o.home.memory && o.slot) {
        planned.uploads.push_back({ o.tensor, o.offset, own });
    }
    if (!o.home.memory && (!o.slot || o.written)) {
        planned.downloads.push_back({ o.tensor, o.offset, own });
    }
    if (o.home.memory && !o.where.memory) {
        if (o.slot) {
            planned.before.push_back({ o.home, own });
        } else {
            planned.after.push_back({ own, o.home });
        }
    }
    if (o.slot && o.slot->room.kind == neuron_group_room::ROWS) {
        neuron_repeat_rows(bound, o.home.size, o.slot->room.period, planned.before);
    }
}

// Sets what a piece has of a group's slots and results.
static void cut_operands(const neuron_group &                group,
                         const neuron_group_piece &          piece,
                         const std::vector<neuron_operand> & bound,
                         std::vector<neuron_operand> &       parts) {
    const size_t n_slots = group.slots.size();
    for (size_t i = 0; i < bound.size(); i++) {
        const bool   slot = i < n_slots;
        const size_t row  = slot ? group.slots[i].row : group.results[i - n_slots].row;
        parts[i].memory   = bound[i].memory;
        parts[i].offset   = bound[i].offset + (size_t) piece.range.first * row;
        if (!slot && !piece.result_sizes.empty()) {
            parts[i].size = piece.result_sizes[i - n_slots];
        } else if (row) {
            parts[i].size = piece.slot_sizes[i];
        }
    }
}

bool neuron_group_placement::bind(neuron_core &        core,
                                  neuron_fusion &      fusion,
                                  neuron_memory *      scratch,
                                  const neuron_group & group,
                                  neuron_planned &     planned,
                                  std::string &        message,
                                  bool &               broken) const {
    const size_t                n_slots = group.slots.size();
    std::vector<neuron_operand> bound;
    std::vector<bool>           written;
    bound.reserve(operands.size());
    written.reserve(n_slots);
    for (const operand & o : operands) {
        bound.push_back(o.where);
        if (!o.where.memory) {
            bound.back().memory = scratch;
        }
        if (written.size() < n_slots) {
            written.push_back(o.written);
        }
    }
    std::vector<neuron_operand> parts = bound;
    for (const neuron_group_piece & piece : group.pieces) {
        cut_operands(group, piece, bound, parts);
        neuron_bound_launch * bound_launch =
            core.bind(piece.kernel, { parts.data(), n_slots, group.results.size(), 0, &written }, message, broken);
        if (!bound_launch) {
            return false;
        }
        planned.launches.push_back({ bound_launch, fusion.launches_of(piece.kernel) });
    }
    planned.fused   = true;
    planned.other   = group.other;
    planned.padding = group.padding;
    for (size_t i = 0; i < operands.size(); i++) {
        add_copies(operands[i], bound[i], planned);
    }
    return true;
}
