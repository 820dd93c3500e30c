#include "async.h"

#include "buffers.h"
#include "core.h"
#include "forms.h"

#include <cstdint>
#include <mutex>
#include <vector>

void ggml_backend_neuron_synchronize(ggml_backend_t backend) {
    auto *                      ctx  = (ggml_backend_neuron_context *) backend->context;
    neuron_core &               core = *ctx->device->core;
    std::lock_guard<std::mutex> lock(core.mutex);
    core.flights.wait_for(ctx->stream);
}

// Tensors in host memory are computed with before the graph is given back.
bool ggml_backend_neuron_is_async(const ggml_backend_neuron_device_context * device) {
    return ggml_backend_neuron_shared().buffers == neuron_buffers::DEVICE && device->core->flights.is_queue();
}

void ggml_backend_neuron_set_tensor_async(ggml_backend_t backend,
                                          ggml_tensor *  tensor,
                                          const void *   data,
                                          size_t         offset,
                                          size_t         size) {
    ggml_backend_tensor_set(tensor, data, offset, size);

    GGML_UNUSED(backend);
}

void ggml_backend_neuron_get_tensor_async(ggml_backend_t      backend,
                                          const ggml_tensor * tensor,
                                          void *              data,
                                          size_t              offset,
                                          size_t              size) {
    ggml_backend_tensor_get(tensor, data, offset, size);

    GGML_UNUSED(backend);
}

// Reads a tensor; returns false when a launch that was to compute it failed. Ends the program when it can't be read otherwise.
static bool ggml_backend_neuron_read_computed(const neuron_buffer &  from,
                                              const ggml_tensor *    src,
                                              std::vector<uint8_t> & data) {
    std::lock_guard<std::mutex> lock(from.core->mutex);
    const neuron_use            use = { from.memory, from.offset_of(src), data.size(), false };
    from.core->flights.wait_for_use(use);
    if (from.core->flights.is_lost(use)) {
        return false;
    }
    if (from.memory->read_locked(data.data(), use.offset, use.size) != NRT_SUCCESS) {
        neuron_require(from.memory->last_failure(), "reading", src);
    }
    return true;
}

// Has the next graph of a backend fail, since a tensor that it would compute with was not computed.
static void ggml_backend_neuron_lose(ggml_backend_t backend, const neuron_buffer & buffer, const ggml_tensor * tensor) {
    auto *                      ctx = (ggml_backend_neuron_context *) backend->context;
    std::lock_guard<std::mutex> lock(buffer.core->mutex);
    buffer.core->flights.lose({ buffer.memory, buffer.offset_of(tensor), ggml_nbytes(tensor), true }, ctx->stream);
}

// Copies from a NeuronCore, or from host memory, to a NeuronCore. Between cores the way leads through the host: the runtime copies
// between tensors of one core only.
bool ggml_backend_neuron_cpy_tensor_async(ggml_backend_t      backend_src,
                                          ggml_backend_t      backend_dst,
                                          const ggml_tensor * src,
                                          ggml_tensor *       dst) {
    auto *                      to     = neuron_buffer_of(dst);
    auto *                      from   = neuron_buffer_of(src);
    const ggml_backend_buffer_t buffer = src->view_src ? src->view_src->buffer : src->buffer;
    // ggml reads what is in a form, and writes it, in ggml's order
    if (!to || !ggml_is_contiguous(src) || neuron_form(src) || neuron_form(dst)) {
        return false;
    }
    if (from && from->core == to->core) {
        return ggml_backend_neuron_buffer_cpy_tensor(dst->buffer, src, dst);
    }
    const size_t size = ggml_nbytes(src);
    if (from) {
        std::vector<uint8_t> data(size);
        if (!ggml_backend_neuron_read_computed(*from, src, data)) {
            ggml_backend_neuron_lose(backend_dst, *to, dst);
            return true;
        }
        neuron_require(to->memory->write(data.data(), to->offset_of(dst), size), "writing", dst);
        return true;
    }
    // what another backend computes into host memory, it may not have computed yet
    if (!buffer || !ggml_backend_buffer_is_host(buffer)) {
        return false;
    }
    ggml_backend_synchronize(backend_src);
    neuron_require(to->memory->write(src->data, to->offset_of(dst), size), "writing", dst);
    return true;
}

//
// events
//

struct ggml_backend_neuron_event_context {
    neuron_core * core   = nullptr;
    uint64_t      number = 0;  // of the launch that is waited for; guarded by the core's mutex
};

void ggml_backend_neuron_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    auto *                      ctx      = (ggml_backend_neuron_context *) backend->context;
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->number = ctx->stream.last;
}

void ggml_backend_neuron_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->core->flights.wait_for(recorded->number);

    GGML_UNUSED(dev);
}

// Launches of one core are computed in order, and the host waits for what it touches; what is launched on another core waits here.
void ggml_backend_neuron_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    if (event->device != backend->device) {
        ggml_backend_event_synchronize(event);
    }
}

ggml_backend_event_t ggml_backend_neuron_device_event_new(ggml_backend_dev_t dev) {
    auto * device = (ggml_backend_neuron_device_context *) dev->context;
    if (!ggml_backend_neuron_is_async(device)) {
        return NULL;
    }
    return new ggml_backend_event{
        /* .device  = */ dev,
        /* .context = */ new ggml_backend_neuron_event_context{ device->core.get(), 0 },
    };
}

void ggml_backend_neuron_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    delete (ggml_backend_neuron_event_context *) event->context;
    delete event;

    GGML_UNUSED(dev);
}
