#include "plan/placement.h"

#include <algorithm>

bool neuron_placement::overlap(const operand & a, const operand & b) {
    return a.tensor && b.tensor && a.begin() < b.begin() + b.home.size && b.begin() < a.begin() + a.home.size;
}

// Adds `size` bytes of a tensor from `offset` on. Kernels have `in_kernel` bytes; if that is more, the operand goes to
// scratch memory.
bool neuron_placement::add(const neuron_core &       core,
                           neuron_locate_t           locate,
                           const neuron_group_slot * slot,
                           ggml_tensor *             t,
                           size_t                    offset,
                           size_t                    size,
                           size_t                    in_kernel) {
    operand o{ {}, {}, t, offset, slot, slot ? slot->room.blocks : neuron_blocks{} };
    if (t) {
        if (!locate(core, t, o.home)) {
            return false;
        }
        if (o.home.size != ggml_nbytes(t)) {  // a weight in a layout with another size; kernels read the whole weight
            if (size != ggml_nbytes(t)) {
                return false;
            }
            size = in_kernel = o.home.size;
        }
        o.home.size = size;
        o.home.offset += o.offset;
        o.where = { in_kernel > size ? nullptr : o.home.memory, o.home.offset, in_kernel, slot && slot->written };
    }
    operands.push_back(o);
    return true;
}

bool neuron_placement::add_slot(const neuron_core &       core,
                                neuron_locate_t           locate,
                                const neuron_group_slot & slot,
                                ggml_tensor *             source) {
    if (!slot.numbers.empty()) {  // the core places them
        operands.push_back({ {}, {}, nullptr, 0, &slot });
        return true;
    }
    ggml_tensor *             t    = slot.tensor ? slot.tensor : source;
    const neuron_group_room & room = slot.room;
    // if the cache continues, the operand has the kernels' size
    const size_t              size = slot.goes_on() ? room.size : slot.size;
    const size_t              rows = room.kind == neuron_group_room::ROWS ? room.size : size;
    const bool                ends = !t || slot.offset + slot.size <= ggml_nbytes(t);
    if (!ends || !add(core, locate, &slot, t, slot.offset, size, rows)) {
        return false;
    }
    if (slot.laid) {
        operands.back().lay_out(slot.laid);
        return true;
    }
    if (!operands.back().is_made()) {
        return true;
    }
    const bool numbers    = slot.first || room.named.n > 1;
    operands.back().where = { nullptr, 0, numbers ? rows : room.size };
    masks.push_back({ slot.mask ? slot.mask : t, {}, operands.back().where, room.wider });
    neuron_long_mask & mask = masks.back();
    if (!locate(core, mask.mask, mask.from)) {
        return false;
    }
    if (numbers) {
        const size_t number = ggml_type_size(t->type);
        mask.wider          = { (int64_t) (rows / number) };
        mask.wider.own      = room.named.n > 1 ? (room.blocks.n > 1) : (int64_t) (slot.size / number);
        mask.first          = slot.first;
        mask.named          = room.named;
    }
    if (!slot.mask) {
        mask.offset = slot.offset;
        mask.from.offset += slot.offset;
        mask.from.size = slot.size;
    }
    return true;
}

// Moves operands so that no result overlaps a source, except the slot whose memory it shares. Returns false when moving
// does not help, in two cases. First, tensors that kernels change must overlap no other tensor of the group, because a
// kernel orders its reads and writes freely; an exception is a sum over devices whose memory a result uses later.
// Second, results overlap when no other node uses one of them; then only the nodes one by one compute ggml's result.
bool neuron_placement::keep_apart(const neuron_group & group, const ggml_tensor *& changed) {
    const size_t n_slots = group.slots.size();
    for (size_t i = 0; i < operands.size(); i++) {
        operand &  o       = operands[i];
        const bool changes = o.where.written && (group.fused || o.home.memory);
        changed            = o.tensor;
        for (size_t j = 0; j < operands.size(); j++) {
            if (j == i || !(changes || (i >= n_slots && j >= n_slots)) || !overlap(o, operands[j])) {
                continue;
            }
            if (!o.slot || !o.slot->summed || j < n_slots) {
                return false;
            }
            o.where.memory = nullptr;  // ggml gives a sum's memory to a result only when no later node reads the sum
            o.lost         = true;
        }
    }
    for (size_t i = n_slots; i < operands.size(); i++) {
        operand & result = operands[i];
        const int alias  = group.results[i - n_slots].alias;
        operand * place  = alias == NEURON_KERNELS_NO_ALIAS ? nullptr : &operands[(size_t) alias];
        // The scheduler copies sources that another backend computed. If it copied an in-place node's destination, the
        // result still belongs in the original's place.
        if (place && place->begin() != result.begin()) {
            place->where.memory = result.where.memory = nullptr;
        }
        // The runtime does not define the effect of a result that overlaps an input. ggml's allocator overlaps them for
        // ops that are safe elementwise. (graph_optimize prevents this if a scheduler is used.)
        for (size_t j = 0; j < n_slots; j++) {
            operand & read = operands[j];
            if (&read != place && read.where.memory && result.where.memory && overlap(read, result)) {
                (place ? read : result).where.memory = nullptr;
            }
        }
    }
    return true;
}

// Returns the operand whose scratch memory an operand shares, or NULL: a tensor in two slots is copied once, unless a
// result replaces one of the two.
const neuron_placement::operand * neuron_placement::shared_with(const neuron_group & group, size_t i) const {
    const size_t n_slots = group.slots.size();
    if (i >= n_slots) {
        const int alias = group.results[i - n_slots].alias;
        return alias == NEURON_KERNELS_NO_ALIAS ? nullptr : &operands[(size_t) alias];
    }
    const auto may_share = [&](size_t slot) {
        const operand & o = operands[slot];
        return !o.home.memory && !o.laid && !o.where.written && !o.is_made() &&
               std::none_of(group.results.begin(), group.results.end(),
                            [slot](const neuron_group_result & result) { return result.alias == (int) slot; });
    };
    const operand & o = operands[i];
    for (size_t j = 0; j < i && may_share(i); j++) {
        const operand & same = operands[j];
        if (same.tensor == o.tensor && same.offset == o.offset && same.where.size == o.where.size &&
            same.blocks == o.blocks && may_share(j)) {
            return &same;
        }
    }
    return nullptr;
}

// Allocates scratch memory for operands that kernels can't use in place, and for data between launches.
void neuron_placement::take_scratch(const neuron_group & group) {
    const auto take = [this](size_t size) {
        const size_t at = end;
        end             = GGML_PAD(end + size, NEURON_ALIGNMENT);
        return at;
    };
    for (size_t i = 0; i < operands.size(); i++) {
        operand & o = operands[i];
        if (!o.where.memory && o.tensor && !o.is_made()) {
            const operand * same = shared_with(group, i);
            o.where.memory       = same ? same->where.memory : nullptr;
            o.where.offset       = same ? same->where.offset : take(o.where.size);
        }
    }
    size_t most = 0;
    for (const neuron_group_piece & piece : group.pieces) {
        most = std::max(most, piece.between);
    }
    for (size_t & at : between) {
        at = take(most);
    }
}

std::string neuron_placement::place(const neuron_core &  core,
                                    neuron_locate_t      locate,
                                    ggml_tensor *        node,
                                    const neuron_group & group) {
    const auto missing = [node](const ggml_tensor * t) {
        return std::string("a tensor of ") + ggml_op_desc(node) + ", " + t->name +
               ", is neither on this NeuronCore nor in host memory";
    };
    operands.reserve(group.slots.size() + group.results.size());
    for (size_t i = 0; i < group.slots.size(); i++) {
        const neuron_group_slot & slot   = group.slots[i];
        ggml_tensor *             source = node->src[slot.source];
        if (!add_slot(core, locate, slot, source)) {
            return missing(slot.tensor ? slot.tensor : source);
        }
    }
    for (const neuron_group_result & result : group.results) {
        ggml_tensor * t    = result.tensor ? result.tensor : node;
        const size_t  all  = result.own ? result.own : ggml_nbytes(t);
        const bool    on   = result.alias != NEURON_KERNELS_NO_ALIAS && group.slots[(size_t) result.alias].goes_on();
        const size_t  size = !result.size ? all
                             : on         ? result.size
                                          : std::min(all, result.size);  // the first rows, or all
        if (!add(core, locate, nullptr, t, result.offset, size, std::max(size, result.size))) {
            return missing(t);
        }
        operands.back().blocks = result.blocks;
        if (result.laid) {
            operands.back().lay_out(result.laid);
        }
    }
    const ggml_tensor * changed = nullptr;
    if (!keep_apart(group, changed)) {
        return std::string(ggml_op_desc(node)) + " changes " + changed->name +
               ", which overlaps another of its tensors";
    }
    take_scratch(group);
    return "";
}

size_t neuron_placement::place_masks(std::vector<neuron_long_mask> & placed, size_t begin) {
    auto mask = masks.begin();
    for (operand & o : operands) {
        if (!o.is_made()) {
            continue;
        }
        const auto same = std::find_if(placed.begin(), placed.end(), [&](const neuron_long_mask & m) {
            return m.mask == mask->mask && m.offset == mask->offset && m.first == mask->first &&
                   m.named == mask->named && m.wider == mask->wider;
        });
        mask->to.offset = o.where.offset = same == placed.end() ? begin : same->to.offset;
        if (same == placed.end()) {
            begin = GGML_PAD(begin + o.where.size, NEURON_ALIGNMENT);
            placed.push_back(*mask);
        }
        ++mask;
    }
    return begin;
}

// Adds the copies that fill an operand with repetitions of its first `own` bytes, which are rows. Each repetition
// begins `period` bytes later.
static void repeat_rows(const neuron_operand & operand, size_t own, size_t period, std::vector<neuron_move> & moves) {
    const size_t gap = period - own;  // behind the last row
    // each copy doubles the filled part
    for (size_t done = period; done < operand.size; done *= 2) {
        const size_t size = std::min(done - gap, operand.size - done);
        moves.push_back({
            { operand.memory, operand.offset,        size },
            { operand.memory, operand.offset + done, size }
        });
    }
}

// Adds the copies around launches for an operand.
void neuron_placement::add_copies(const operand & o, neuron_memory * scratch, neuron_planned & planned) const {
    if (!o.tensor || o.where.memory || o.is_made()) {
        return;
    }
    if (o.laid) {
        const neuron_operand core = { scratch, o.where.offset, o.where.size };
        if (!o.slot || o.laid->is_read) {
            (o.slot ? planned.laid_out : planned.taken_back).push_back({ o.tensor, o.home, core, o.laid });
        }
        return;
    }
    const bool known =
        o.slot && std::any_of(planned.uploads.begin(), planned.uploads.end(),
                              [&](const neuron_transfer & u) { return u.core.offset == o.where.offset; });
    for (int64_t i = 0; i < o.blocks.n; i++) {
        const size_t         begin = (size_t) i * o.blocks.own;  // in the tensor
        const size_t         at    = (size_t) i * o.blocks.kernel;
        const size_t         size  = o.blocks.n > 1 ? std::min(o.home.size - begin, o.blocks.own) : o.home.size;
        const neuron_operand own   = { scratch, o.where.offset + at, size };  // without the kernels' additional bytes
        const neuron_operand home  = { o.home.memory, o.home.offset + begin, size };
        if (!o.home.memory && (!o.slot || o.slot->written)) {
            planned.downloads.push_back({ o.tensor, o.offset + begin, own });
        } else if (!o.slot || (o.slot->written && !o.lost)) {
            planned.after.push_back({ own, home });
        }
        if (!o.slot || known) {
            continue;
        }
        if (o.home.memory) {
            planned.before.push_back({ home, own });
        } else {
            planned.uploads.push_back({ o.tensor, o.offset + begin, own });
        }
        const neuron_group_room & room = o.slot->room;
        if (room.kind == neuron_group_room::ROWS && room.period) {
            const size_t whole = o.where.size - at;
            const size_t rows  = o.blocks.n > 1 ? std::min(whole, o.blocks.kernel) : whole;
            repeat_rows({ scratch, own.offset, rows }, size, o.blocks.n > 1 ? o.blocks.own : room.period,
                        planned.before);
        }
    }
}

bool neuron_placement::bind(neuron_core &        core,
                            neuron_fusion &      fusion,
                            neuron_memory *      scratch,
                            const neuron_group & group,
                            neuron_planned &     planned,
                            std::string &        message,
                            bool &               broken) const {
    const size_t                             n_slots = group.slots.size();
    thread_local std::vector<neuron_operand> parts;  // of a piece: its sources, and then its results
    size_t                                   turn = 0;
    parts.clear();
    std::vector<neuron_operand> numbers(n_slots);
    for (size_t i = 0; i < n_slots; i++) {
        const std::vector<int> & of = group.slots[i].numbers;
        if (of.empty()) {
            continue;
        }
        planned.numbers.push_back({ of, neuron_numbers_of(planned.members, of) });
        numbers[i] = core.numbers(planned.numbers.back().values, message);
        if (!numbers[i].memory) {
            return false;
        }
    }
    for (const neuron_group_piece & piece : group.pieces) {
        const auto add_part = [&](size_t i, size_t row) {
            if (i < n_slots && numbers[i].memory) {
                parts.push_back(numbers[i]);
                return;
            }
            neuron_operand part = operands[i].where;
            part.memory         = part.memory || !part.size ? part.memory : scratch;
            part.offset += (size_t) piece.range.first * row;
            part.size -= (size_t) (group.rows - piece.range.n) * row;
            parts.push_back(part);
        };
        const neuron_operand previous = parts.empty() ? neuron_operand{} : parts.back();
        parts.clear();
        for (size_t i = 0; piece.inputs.empty() && i < n_slots; i++) {
            add_part(i, group.slots[i].row);
        }
        for (const int i : piece.inputs) {
            if (i >= 0) {
                add_part((size_t) i, group.slots[(size_t) i].row);
            } else {
                parts.push_back(i == neuron_group_piece::PREVIOUS ? previous : neuron_operand{});
            }
        }
        const size_t n_inputs = parts.size();
        if (piece.between) {
            parts.push_back({ scratch, between[turn], piece.between });
        }
        turn = piece.between ? 1 - turn : 0;
        for (size_t i = n_slots; !piece.between && i < operands.size(); i++) {
            if (piece.result == neuron_group_piece::ALL || (size_t) piece.result == i - n_slots) {
                add_part(i, group.results[i - n_slots].row);
            }
        }
        neuron_bound_launch * bound_launch =
            core.bind(piece.kernel, { parts.data(), n_inputs, parts.size() - n_inputs }, message, broken);
        if (!bound_launch) {
            return false;
        }
        planned.launches.push_back({ bound_launch, group.fused ? fusion.launches_of(piece.kernel) : nullptr });
    }
    planned.fused   = group.fused;
    planned.other   = group.other;
    planned.padding = group.padding;
    for (neuron_long_mask mask : masks) {
        mask.to.memory = scratch;
        planned.masks.push_back(mask);
    }
    for (const operand & o : operands) {
        add_copies(o, scratch, planned);
    }
    return true;
}
