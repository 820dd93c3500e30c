// Tensors and sets of them: nrt_tensor_* and nrt_*_tensor_set.

#include "tensors.h"

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "faults.h"
#include "log.h"
#include "runtime.h"
#include "units.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace simulator {

// Returns the arena of a core, or of the host; null when the process does not have the core.
static std::shared_ptr<simulator::arena> arena_of(runtime & rt, nrt_tensor_placement_t placement, int vnc) {
    if (placement == NRT_TENSOR_PLACEMENT_HOST) {
        return rt.host();
    }
    if (placement != NRT_TENSOR_PLACEMENT_DEVICE || vnc < 0 || static_cast<uint32_t>(vnc) >= rt.cores()) {
        return nullptr;
    }
    return rt.arenas[static_cast<size_t>(vnc)];
}

std::shared_ptr<nrt_tensor> tensor_range(runtime &            rt,
                                         const nrt_tensor_t * handle,
                                         size_t               offset,
                                         size_t               size,
                                         const char *         where,
                                         NRT_STATUS &         status) {
    auto tensor = rt.tensors.find(handle);
    if (tensor == nullptr) {
        status = invalid_handle(where, "tensor");
        return nullptr;
    }
    if (!tensor->holds(offset, size)) {
        log(level::error, where, "tensor '%s': %zu bytes at %zu are not within its %zu", tensor->name.c_str(), size,
            offset, tensor->size);
        status = NRT_INVALID;
        return nullptr;
    }
    status = core_status(rt, tensor->arena(), where);
    return status == NRT_SUCCESS ? tensor : nullptr;
}

simulator::span span_of(const nrt_tensor & tensor, size_t offset, size_t size, bool written) {
    const size_t begin = tensor.position() + offset;
    return { tensor.arena(), begin, begin + size, written };
}

NRT_STATUS check_in_flight(const runtime &                      rt,
                           const std::vector<simulator::span> & spans,
                           const simulator::unit *              own,
                           const char *                         where) {
    if (!rt.config.strict || !rt.units->busy(spans, own)) {
        return NRT_SUCCESS;
    }
    log(level::error, where, "a request in flight uses this memory, and its completion was not waited for");
    return NRT_INVALID;
}

void count_transfer(runtime & rt, const nrt_tensor & written, bool queued) {
    if (written.arena() != rt.host()->index()) {
        core_state & core = rt.core_states[written.arena()];
        (queued ? core.queued : core.waited)++;
    }
}

NRT_STATUS prepare_copy(runtime &            rt,
                        const nrt_tensor_t * source,
                        size_t               source_offset,
                        const nrt_tensor_t * destination,
                        size_t               destination_offset,
                        size_t               size,
                        const char *         where,
                        copying &            out) {
    NRT_STATUS status;
    out.source = tensor_range(rt, source, source_offset, size, where, status);
    if (out.source == nullptr) {
        return status;
    }
    out.destination = tensor_range(rt, destination, destination_offset, size, where, status);
    if (out.destination == nullptr) {
        return status;
    }
    const uint32_t host = rt.host()->index();
    const uint32_t from = out.source->arena();
    const uint32_t to   = out.destination->arena();
    if (from != to && from != host && to != host) {
        log(level::error, where, "from core %u to core %u", from, to);
        return NRT_INVALID;
    }
    out.source_offset      = source_offset;
    out.destination_offset = destination_offset;
    out.size               = size;
    return NRT_SUCCESS;
}

}  // namespace simulator

using namespace simulator;

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t ** out) {
    return with_runtime("nrt_allocate_tensor_set", [&](runtime & rt) {
        if (out == nullptr) {
            return invalid("nrt_allocate_tensor_set", "null pointer");
        }
        *out = nullptr;
        if (is_out_of_memory(rt, "nrt_allocate_tensor_set")) {
            return NRT_RESOURCE;
        }
        *out = rt.sets.add(std::make_shared<nrt_tensor_set>());
        return NRT_SUCCESS;
    });
}

void nrt_destroy_tensor_set(nrt_tensor_set_t ** set) {
    if (set != nullptr && *set != nullptr) {
        // After nrt_close there are no sets, and an unknown handle is not an error.
        check_freed(process(), *set, "nrt_destroy_tensor_set");
        process().sets.remove(*set);
        *set = nullptr;
    }
}

NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t * handle, const char * name, nrt_tensor_t * tensor_handle) {
    const char * const where = "nrt_add_tensor_to_tensor_set";
    return with_runtime(where, [&](runtime & rt) {
        const auto set    = rt.sets.find(handle);
        const auto tensor = rt.tensors.find(tensor_handle);
        if (set == nullptr || tensor == nullptr) {
            return invalid_handle(where, set == nullptr ? "set" : "tensor");
        }
        if (name == nullptr || strlen(name) >= NRT_TENSOR_NAME_MAX) {
            return invalid(where, name == nullptr ? "a tensor without a name" : "a name of 256 bytes or more");
        }
        set->put(name, tensor);
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t * handle, const char * name, nrt_tensor_t ** out) {
    const char * const where = "nrt_get_tensor_from_tensor_set";
    return with_runtime(where, [&](runtime & rt) {
        const auto set = rt.sets.find(handle);
        if (set == nullptr) {
            return invalid_handle(where, "set");
        }
        if (name == nullptr || out == nullptr) {
            return invalid(where, "null pointer");
        }
        std::shared_ptr<nrt_tensor> tensor;
        if (!set->find(name, tensor)) {
            log(level::error, where, "the set has no tensor '%s'", name);
            return NRT_FAILURE;
        }
        *out = tensor.get();
        return *out == nullptr ? invalid_handle(where, name) : NRT_SUCCESS;
    });
}

// A page of physical memory. Source: AWS Neuron, nrt_tensor_allocate in the developer guide of the runtime.
static constexpr size_t MAX_HOST_TENSOR = size_t(4) << 20;

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement,
                               int                    vnc,
                               size_t                 size,
                               const char *           name,
                               nrt_tensor_t **        out) {
    const char * const where = "nrt_tensor_allocate";
    return with_runtime(where, [&](runtime & rt) {
        if (out == nullptr || size == 0) {
            return invalid(where, out == nullptr ? "null pointer" : "0 bytes");
        }
        *out             = nullptr;
        const auto arena = arena_of(rt, placement, vnc);
        if (arena == nullptr) {
            log(level::error, where, "no core %d, or placement %d is none that is simulated", vnc,
                static_cast<int>(placement));
            return NRT_INVALID;
        }
        if (arena == rt.host() && rt.config.strict && size > MAX_HOST_TENSOR) {
            log(level::error, where, "%zu bytes for '%s' in the host's memory: 4 MiB are the most", size,
                name == nullptr ? "" : name);
            return NRT_INVALID;
        }
        if (arena != rt.host() && rt.config.overflows() && size >= size_t(1) << 32) {
            log(level::error, where, "%zu bytes for '%s': before release 2.28 sizes of 4 GiB and more overflow", size,
                name == nullptr ? "" : name);
            return NRT_INVALID;
        }
        const NRT_STATUS core = core_status(rt, arena->index(), where);
        if (core != NRT_SUCCESS || is_out_of_memory(rt, where)) {
            return core != NRT_SUCCESS ? core : NRT_RESOURCE;
        }
        auto memory = simulator::memory::allocate(arena, size);
        if (memory == nullptr) {
            log(level::error, where, "%zu bytes for '%s' on core %d: %zu of %zu are in use", size,
                name == nullptr ? "" : name, vnc, arena->used(), arena->size());
            return NRT_RESOURCE;
        }
        *out = rt.tensors.add(std::make_shared<nrt_tensor>(std::move(memory), 0, size, name));
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t * handle,
                                     size_t               offset,
                                     size_t               size,
                                     const char *         name,
                                     nrt_tensor_t **      out) {
    const char * const where = "nrt_tensor_allocate_slice";
    return with_runtime(where, [&](runtime & rt) {
        if (out == nullptr || size == 0) {
            return invalid(where, out == nullptr ? "null pointer" : "0 bytes");
        }
        *out = nullptr;
        NRT_STATUS status;
        const auto source = tensor_range(rt, handle, offset, size, where, status);
        if (offset % rt.config.slice_alignment != 0) {
            log(level::error, where, "offset %zu of '%s' is not a multiple of %zu (NEURON_SIMULATOR_SLICE_ALIGNMENT)",
                offset, name == nullptr ? "" : name, rt.config.slice_alignment);
            return NRT_INVALID;
        }
        if (source != nullptr && is_out_of_memory(rt, where)) {
            return NRT_RESOURCE;
        }
        if (source != nullptr) {
            const size_t at = source->offset + (rt.faults.strikes("slices") ? 0 : offset);
            *out            = rt.tensors.add(std::make_shared<nrt_tensor>(source->memory, at, size, name));
        }
        return status;
    });
}

void nrt_tensor_free(nrt_tensor_t ** handle) {
    if (handle != nullptr && *handle != nullptr) {
        check_freed(process(), *handle, "nrt_tensor_free");
        process().tensors.remove(*handle);
        *handle = nullptr;
    }
}

size_t nrt_tensor_get_size(const nrt_tensor_t * handle) {
    const auto tensor = process().tensors.find(handle);
    return tensor == nullptr ? 0 : tensor->size;
}

void * nrt_tensor_get_va(const nrt_tensor_t * handle) {
    runtime &  rt     = process();
    const auto tensor = rt.tensors.find(handle);
    // Device memory is not host memory: a client that dereferences this pointer fails on a device.
    return tensor == nullptr || tensor->arena() != rt.host()->index() ? nullptr : tensor->data();
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t * handle, void * data, size_t offset, size_t size) {
    const char * const where = "nrt_tensor_read";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor == nullptr || size == 0) {
            return status;
        }
        if (data == nullptr) {
            return invalid(where, "null pointer");
        }
        status = check_in_flight(rt, { span_of(*tensor, offset, size, false) }, nullptr, where);
        if (status == NRT_SUCCESS) {
            memcpy(data, tensor->data() + offset, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t * handle, const void * data, size_t offset, size_t size) {
    const char * const where = "nrt_tensor_write";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor == nullptr || size == 0) {
            return status;
        }
        if (data == nullptr) {
            return invalid(where, "null pointer");
        }
        count_transfer(rt, *tensor, false);
        status = check_in_flight(rt, { span_of(*tensor, offset, size, true) }, nullptr, where);
        if (status == NRT_SUCCESS && !(rt.units->any_queued() && rt.faults.strikes("writes"))) {
            tensor->memory->in().write(tensor->position() + offset, data, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_memset(nrt_tensor_t * handle, uint64_t offset, int value, size_t size) {
    const char * const where = "nrt_tensor_memset";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor != nullptr) {
            status = check_in_flight(rt, { span_of(*tensor, offset, size, true) }, nullptr, where);
        }
        if (status == NRT_SUCCESS) {
            tensor->memory->in().fill(tensor->position() + offset, value, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_copy(const nrt_tensor_t * source_handle,
                           size_t               source_offset,
                           nrt_tensor_t *       destination_handle,
                           size_t               destination_offset,
                           size_t               size) {
    const char * const where = "nrt_tensor_copy";
    return with_runtime(where, [&](runtime & rt) {
        copying          copy;
        const NRT_STATUS status =
            prepare_copy(rt, source_handle, source_offset, destination_handle, destination_offset, size, where, copy);
        if (status != NRT_SUCCESS) {
            return status;
        }
        count_transfer(rt, *copy.destination, false);
        const NRT_STATUS ordered = check_in_flight(rt, copy.spans(), nullptr, where);
        return ordered == NRT_SUCCESS ? copy.run(rt) : ordered;
    });
}
