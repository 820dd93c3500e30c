#include "compute.h"

#include "buffers.h"
#include "counts.h"
#include "cpu.h"
#include "group_plan.h"
#include "log.h"
#include "record.h"

#include <cstring>
#include <string>
#include <vector>

enum ggml_status neuron_ggml_status(NRT_STATUS status) {
    return status == NRT_RESOURCE || status == NRT_FAIL_HOST_MEM_ALLOC ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

// locked
static enum ggml_status neuron_compute_with_copies(neuron_core & core, ggml_tensor * node) {
    const auto offset = [](const ggml_tensor * owner, const void * address) {
        return (size_t) ((const char *) address - neuron_buffer_of(owner)->base);
    };
    neuron_host_access access;
    access.is_device = [](const ggml_tensor * t) {
        return neuron_buffer_of(t) != nullptr;
    };
    uint64_t moved = 0;
    access.read    = [&](const ggml_tensor * owner, const void * address, void * data, size_t size) {
        auto * ctx = neuron_buffer_of(owner);
        if (ctx->core != &core) {
            return false;
        }
        const auto from_device = [&]() -> std::string {
            moved += size;
            const auto read = [ctx](void * to, size_t at, size_t n) {
                return ctx->memory->read_locked(to, at, n) == NRT_SUCCESS ? std::string() : "it can't be read";
            };
            const neuron_packed_bytes packed(ctx->base, owner, address, size);
            return packed.form ? neuron_read_packed(*ctx, packed, (uint8_t *) data, read)
                               : read(data, offset(owner, address), size);
        };
        return neuron_read_or_recall(*ctx, ctx->memory->version, owner, address, data, size, from_device).empty();
    };
    access.write = [&](const ggml_tensor * owner, const void * address, const void * data, size_t size) {
        moved += size;
        auto * ctx = neuron_buffer_of(owner);
        if (neuron_form(owner)) {
            NEURON_ERROR("%s is a weight in a form of its own, which no op can write to\n", owner->name);
            return false;
        }
        return ctx->core == &core && ctx->memory->write_locked(data, offset(owner, address), size) == NRT_SUCCESS;
    };
    g_counts.cpu[node->op]++;
    neuron_note_executed(node);
    const enum ggml_status status = neuron_compute_on_cpu(node, access);
    g_counts.fallback.add(node, moved);
    return status;
}

// locked
static enum ggml_status neuron_set_zero(const neuron_core & core, const ggml_tensor * node) {
    neuron_operand result;
    if (!neuron_locate(core, node, result)) {
        return GGML_STATUS_FAILED;
    }
    if (!result.memory) {
        memset(node->data, 0, result.size);
        return GGML_STATUS_SUCCESS;
    }
    const NRT_STATUS status = result.memory->set_locked(0, result.offset, result.size);
    return status == NRT_SUCCESS ? GGML_STATUS_SUCCESS : neuron_ggml_status(status);
}

// locked. Writes a mask as kernels for a longer cache want it: what is beyond the node's cache is hidden.
static NRT_STATUS neuron_write_long_mask(neuron_core & core, neuron_stream & stream, const neuron_long_mask & m) {
    if (!m.from.memory) {
        const auto longer = neuron_lengthen_mask(m.mask, (const uint8_t *) m.mask->data, m.n_more, m.rows);
        return core.write(stream, m.to, longer.data());
    }
    const std::vector<neuron_use> uses = {
        { m.from.memory, m.from.offset, m.from.size, false },
        { m.to.memory,   m.to.offset,   m.to.size,   true  },
    };
    // the tensor may be gone when a job is done
    return core.in_order(stream, uses, [m, mask = *m.mask](uint64_t number) {
        std::vector<uint8_t> data(m.from.size);
        const NRT_STATUS     status = m.from.memory->read_locked(data.data(), m.from.offset, data.size(), number);
        if (status != NRT_SUCCESS) {
            return status;
        }
        const std::vector<uint8_t> longer = neuron_lengthen_mask(&mask, data.data(), m.n_more, m.rows);
        return m.to.memory->write_locked(longer.data(), m.to.offset, longer.size(), number);
    });
}

// locked
static NRT_STATUS neuron_write_long_masks(neuron_core &               core,
                                          neuron_stream &             stream,
                                          const neuron_planned_node & planned) {
    NRT_STATUS status = NRT_SUCCESS;
    for (size_t i = 0; i < planned.masks.size() && status == NRT_SUCCESS; i++) {
        status = neuron_write_long_mask(core, stream, planned.masks[i]);
    }
    return status;
}

// locked
static enum ggml_status neuron_compute_group(neuron_core &               core,
                                             neuron_stream &             stream,
                                             const neuron_planned_node & planned) {
    const neuron_planned_group & group  = *planned.group;
    NRT_STATUS                   status = neuron_write_long_masks(core, stream, planned);
    for (size_t i = 0; i < group.uploads.size() && status == NRT_SUCCESS; i++) {
        const neuron_group_transfer & u = group.uploads[i];
        status                          = core.write(stream, u.core, u.host);
        g_counts.uploaded.fetch_add(u.core.size, std::memory_order_relaxed);
    }
    for (size_t i = 0; i < group.before.size() && status == NRT_SUCCESS; i++) {
        status = core.copy(stream, group.before[i].from, group.before[i].to);
    }
    for (size_t i = 0; i < group.launches.size() && status == NRT_SUCCESS; i++) {
        status = core.execute(*group.launches[i].step, stream, group.members.back().node->name);
    }
    for (size_t i = 0; i < group.after.size() && status == NRT_SUCCESS; i++) {
        status = core.copy(stream, group.after[i].from, group.after[i].to);
    }
    for (size_t i = 0; i < group.downloads.size() && status == NRT_SUCCESS; i++) {
        const neuron_group_transfer & d = group.downloads[i];
        status                          = d.core.memory->read_locked(d.host, d.core.offset, d.core.size);
    }
    if (status != NRT_SUCCESS) {
        return neuron_ggml_status(status);
    }
    for (const neuron_group_member & member : group.members) {
        g_counts.device[member.node->op].fetch_add(1, std::memory_order_relaxed);
    }
    g_counts.launches.fetch_add(group.launches.size(), std::memory_order_relaxed);
    g_counts.grouped.fetch_add(group.members.size(), std::memory_order_relaxed);
    g_counts.moves.fetch_add(group.before.size() + group.after.size(), std::memory_order_relaxed);
    if (group.other) {
        g_counts.pieces.fetch_add(group.launches.size(), std::memory_order_relaxed);
        g_counts.padding.fetch_add((uint64_t) group.padding, std::memory_order_relaxed);
    }
    for (const neuron_group_launch & launch : group.launches) {
        launch.counter->fetch_add(1, std::memory_order_relaxed);
    }
    return GGML_STATUS_SUCCESS;
}

enum ggml_status neuron_compute(neuron_core & core, neuron_stream & stream, const neuron_planned_node & planned) {
    if (planned.group) {
        return neuron_compute_group(core, stream, planned);
    }
    if (planned.later) {
        g_counts.device[planned.node->op].fetch_add(1, std::memory_order_relaxed);
        return GGML_STATUS_SUCCESS;
    }
    if (planned.steps.empty()) {
        return neuron_is_zero(planned.node) ? neuron_set_zero(core, planned.node)
                                            : neuron_compute_with_copies(core, planned.node);
    }
    const NRT_STATUS masked = neuron_write_long_masks(core, stream, planned);
    if (masked != NRT_SUCCESS) {
        return neuron_ggml_status(masked);
    }
    for (const neuron_upload & u : planned.uploads) {
        const NRT_STATUS status = core.write(stream, u.to, u.from->data);
        g_counts.uploaded.fetch_add(u.to.size, std::memory_order_relaxed);
        if (status != NRT_SUCCESS) {
            return neuron_ggml_status(status);
        }
    }
    for (const neuron_move & m : planned.before) {
        const NRT_STATUS status = core.copy(stream, m.from, m.to);
        if (status != NRT_SUCCESS) {
            return neuron_ggml_status(status);
        }
    }
    for (neuron_step * step : planned.steps) {
        const NRT_STATUS status = core.execute(*step, stream, planned.node->name);
        if (status != NRT_SUCCESS) {
            return neuron_ggml_status(status);
        }
    }
    for (const neuron_move & m : planned.after) {
        const NRT_STATUS status = core.copy(stream, m.from, m.to);
        if (status != NRT_SUCCESS) {
            return neuron_ggml_status(status);
        }
    }
    for (const neuron_download & d : planned.downloads) {
        const NRT_STATUS status = d.from.memory->read_locked(d.to->data, d.from.offset, d.from.size);
        if (status != NRT_SUCCESS) {
            return neuron_ggml_status(status);
        }
    }
    g_counts.device[planned.node->op].fetch_add(1, std::memory_order_relaxed);
    if (planned.cut) {
        g_counts.pieces.fetch_add(planned.steps.size(), std::memory_order_relaxed);
        g_counts.padding.fetch_add((uint64_t) planned.padding, std::memory_order_relaxed);
    }
    if (!planned.before.empty() || !planned.after.empty()) {
        g_counts.moves.fetch_add(planned.before.size() + planned.after.size(), std::memory_order_relaxed);
    }
    return GGML_STATUS_SUCCESS;
}
