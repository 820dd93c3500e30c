#include "plan/compute.h"

#include "device/known_bytes.h"
#include "fallback/cpu.h"
#include "ggml/buffers.h"
#include "report/log.h"
#include "report/metrics.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
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
            return packed.layout ? neuron_read_packed(*ctx, packed, (uint8_t *) data, read)
                                 : read(data, offset(owner, address), size);
        };
        return neuron_read_or_recall(*ctx, ctx->memory->version, owner, address, data, size, from_device).empty();
    };
    access.write = [&](const ggml_tensor * owner, const void * address, const void * data, size_t size) {
        moved += size;
        auto * ctx = neuron_buffer_of(owner);
        if (neuron_layout(owner)) {
            NEURON_ERROR("%s is a repacked weight, and no op can write to it\n", owner->name);
            return false;
        }
        return ctx->core == &core && ctx->memory->write_locked(data, offset(owner, address), size) == NRT_SUCCESS;
    };
    g_metrics.cpu[node->op]++;
    const enum ggml_status status = neuron_compute_on_cpu(node, access);
    g_metrics.fallback.add(node, moved);
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

// Returns the data of a matrix for kernels with more columns, such as a mask for a longer cache, or of row numbers.
static std::vector<uint8_t> neuron_made(const neuron_long_mask & m, const ggml_tensor * t, const uint8_t * data) {
    return m.named.n > 1 ? neuron_renamed_rows(t, data, m.named, m.wider.own > 0, m.wider.columns)
           : m.first     ? neuron_rows_from(t, data, m.first, m.wider.own, m.wider.columns)
                         : neuron_widen(t, data, m.wider);
}

// locked. Writes data that the host computes.
static NRT_STATUS neuron_write_long_mask(neuron_core & core, neuron_stream & stream, const neuron_long_mask & m) {
    // known bytes are in order with all launches
    if (!m.from.memory) {
        return core.write(stream, m.to, neuron_made(m, m.mask, m.host()));
    }
    std::shared_ptr<const uint8_t> data;
    const NRT_STATUS               status = neuron_recall(m.from, data);
    return status != NRT_SUCCESS ? status : core.write(stream, m.to, neuron_made(m, m.mask, data.get()));
}

// locked. Copies a tensor into the layout of a kernel.
static NRT_STATUS neuron_lay_out(neuron_core & core, neuron_stream & stream, const neuron_laid_copy & c) {
    if (!c.home.memory) {
        return core.write(stream, c.core, c.laid->lay_out((const uint8_t *) c.tensor->data));
    }
    std::vector<uint8_t> data(c.home.size);
    const NRT_STATUS     status = c.home.memory->read_locked(data.data(), c.home.offset, c.home.size);
    return status != NRT_SUCCESS ? status : core.write(stream, c.core, c.laid->lay_out(data.data()));
}

// locked. Copies a kernel's result into the layout of the node's result.
static NRT_STATUS neuron_take_back(neuron_core & core, neuron_stream & stream, const neuron_laid_copy & c) {
    std::vector<uint8_t> data(c.core.size);
    const NRT_STATUS     status = c.core.memory->read_locked(data.data(), c.core.offset, c.core.size);
    if (status != NRT_SUCCESS) {
        return status;
    }
    if (!c.home.memory) {
        c.laid->take_back(data.data(), (uint8_t *) c.tensor->data);
        return NRT_SUCCESS;
    }
    std::vector<uint8_t> own(c.home.size);
    c.laid->take_back(data.data(), own.data());
    return core.write(stream, c.home, std::move(own));
}

// Calls a function with each item until one fails.
template <typename T, typename F> static NRT_STATUS neuron_for_each(const T & items, NRT_STATUS status, F function) {
    for (auto it = items.begin(); it != items.end() && status == NRT_SUCCESS; ++it) {
        status = function(*it);
    }
    return status;
}

// locked. Does the planned work before the launches.
static NRT_STATUS neuron_prepare(neuron_core & core, neuron_stream & stream, const neuron_planned & planned) {
    NRT_STATUS status = neuron_for_each(planned.masks, NRT_SUCCESS, [&](const neuron_long_mask & m) {
        return neuron_write_long_mask(core, stream, m);
    });
    status            = neuron_for_each(planned.uploads, status, [&](const neuron_transfer & u) {
        g_metrics.uploaded.fetch_add(u.core.size, std::memory_order_relaxed);
        const auto * host = (const uint8_t *) u.host();
        return core.write(stream, u.core, std::vector<uint8_t>(host, host + u.core.size));
    });
    status            = neuron_for_each(planned.laid_out, status,
                                        [&](const neuron_laid_copy & c) { return neuron_lay_out(core, stream, c); });
    return neuron_for_each(planned.before, status,
                           [&](const neuron_move & m) { return core.copy(stream, m.from, m.to); });
}

// locked. Does the planned work behind the launches.
static NRT_STATUS neuron_complete(neuron_core & core, neuron_stream & stream, const neuron_planned & planned) {
    NRT_STATUS status = neuron_for_each(planned.after, NRT_SUCCESS,
                                        [&](const neuron_move & m) { return core.copy(stream, m.from, m.to); });
    status            = neuron_for_each(planned.downloads, status, [](const neuron_transfer & d) {
        return d.core.memory->read_locked(d.host(), d.core.offset, d.core.size);
    });
    status            = neuron_for_each(planned.taken_back, status,
                                        [&](const neuron_laid_copy & c) { return neuron_take_back(core, stream, c); });
    if (status == NRT_SUCCESS) {
        g_metrics.moves.fetch_add(planned.before.size() + planned.after.size(), std::memory_order_relaxed);
    }
    return status;
}

// Counts the launches in the metrics.
static void neuron_count(const neuron_planned & planned) {
    for (const neuron_member & member : planned.members) {
        g_metrics.device[member.node->op].fetch_add(1, std::memory_order_relaxed);
    }
    if (planned.fused) {
        g_metrics.launches.fetch_add(planned.launches.size(), std::memory_order_relaxed);
        g_metrics.grouped.fetch_add(planned.members.size(), std::memory_order_relaxed);
    }
    if (planned.other) {
        g_metrics.pieces.fetch_add(planned.launches.size(), std::memory_order_relaxed);
        g_metrics.padding.fetch_add((uint64_t) planned.padding, std::memory_order_relaxed);
    }
    for (const neuron_planned_launch & launch : planned.launches) {
        if (launch.counter) {
            launch.counter->fetch_add(1, std::memory_order_relaxed);
        }
    }
}

enum ggml_status neuron_compute(neuron_core & core, neuron_stream & stream, const neuron_planned & planned) {
    if (planned.launches.empty()) {
        enum ggml_status status = GGML_STATUS_SUCCESS;
        for (auto m = planned.members.begin(); m != planned.members.end() && status == GGML_STATUS_SUCCESS; ++m) {
            status =
                neuron_is_zero(m->node) ? neuron_set_zero(core, m->node) : neuron_compute_with_copies(core, m->node);
        }
        return status;
    }
    enum ggml_status status = GGML_STATUS_SUCCESS;
    for (size_t step = 0; step <= planned.launches.size() && status == GGML_STATUS_SUCCESS; step++) {
        status = neuron_compute_step(core, stream, planned, step);
    }
    return status;
}

enum ggml_status neuron_compute_step(neuron_core &          core,
                                     neuron_stream &        stream,
                                     const neuron_planned & planned,
                                     size_t                 step) {
    NRT_STATUS status = step == 0 ? neuron_prepare(core, stream, planned) : NRT_SUCCESS;
    if (status == NRT_SUCCESS) {
        status = step < planned.launches.size()
                     ? core.execute(*planned.launches[step].bound_launch, stream, planned.last()->name)
                     : neuron_complete(core, stream, planned);
    }
    if (status != NRT_SUCCESS) {
        return neuron_ggml_status(status);
    }
    if (step == planned.launches.size()) {
        neuron_count(planned);
    }
    return GGML_STATUS_SUCCESS;
}
