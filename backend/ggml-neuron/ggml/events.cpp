#include "ggml/events.h"

#include "device/core.h"
#include "ggml/buffers.h"
#include "ggml/chain.h"
#include "select/tensors.h"
#include "weights/layouts.h"

#include <cstdint>
#include <mutex>
#include <vector>

void ggml_backend_neuron_synchronize(ggml_backend_t backend) {
    neuron_flush_chains();
    auto *                      ctx  = (ggml_backend_neuron_context *) backend->context;
    neuron_core &               core = *ctx->device->core;
    std::lock_guard<std::mutex> lock(core.mutex);
    core.launch_queue.wait_for(ctx->stream);
}

// Graphs of tensors in host memory are complete when graph_compute returns.
bool ggml_backend_neuron_is_async(const ggml_backend_neuron_device_context * device) {
    return ggml_backend_neuron_shared().buffers == neuron_buffers::DEVICE && device->core->launch_queue.is_queue();
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

bool ggml_backend_neuron_cpy_tensor_async(ggml_backend_t      backend_src,
                                          ggml_backend_t      backend_dst,
                                          const ggml_tensor * src,
                                          ggml_tensor *       dst) {
    neuron_flush_chains();
    auto *                      to     = neuron_buffer_of(dst);
    auto *                      from   = neuron_buffer_of(src);
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(src);
    // ggml reads and writes tensors in layouts in its own order
    if (!to || !ggml_is_contiguous(src) || neuron_layout(src) || neuron_layout(dst)) {
        return false;
    }
    if (from && from->core == to->core) {
        return ggml_backend_neuron_buffer_cpy_tensor(dst->buffer, src, dst);
    }
    const size_t size = ggml_nbytes(src);
    if (from) {
        auto * ctx = (ggml_backend_neuron_context *) backend_dst->context;
        // On a thread of its own this copy was measured to deadlock with collectives.
        to->core->copy_from(ctx->stream, { from->memory, from->offset_of(src), size },
                            { to->memory, to->offset_of(dst), size });
        return true;
    }
    // another backend may not have computed this host memory yet
    if (!buffer || !ggml_backend_buffer_is_host(buffer)) {
        return false;
    }
    ggml_backend_synchronize(backend_src);
    const bool input = dst->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE;
    neuron_require(
        input ? neuron_write_input(dst, src->data, 0, size) : to->memory->write(src->data, to->offset_of(dst), size),
        "writing", dst);
    return true;
}

//
// events
//

struct ggml_backend_neuron_event_context {
    neuron_core * core   = nullptr;
    uint64_t      number = 0;  // the awaited launch; guarded by the core's mutex
};

void ggml_backend_neuron_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    neuron_flush_chains();
    GGML_ASSERT(event->device == backend->device && "a backend records events of its own device");
    auto *                      ctx      = (ggml_backend_neuron_context *) backend->context;
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->number = ctx->stream.last;
}

void ggml_backend_neuron_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->core->launch_queue.wait_for(recorded->number);

    GGML_UNUSED(dev);
}

// A core works in order, so it never waits for itself.
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
    auto * event   = new ggml_backend_event{};
    event->device  = dev;
    event->context = new ggml_backend_neuron_event_context{ device->core.get(), 0 };
    return event;
}

void ggml_backend_neuron_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    delete (ggml_backend_neuron_event_context *) event->context;
    delete event;

    GGML_UNUSED(dev);
}
