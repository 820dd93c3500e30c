#include "host_buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstdlib>

static constexpr size_t PAGE = 4096;

static const char * neuron_host_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    return "NEURON_Host";

    GGML_UNUSED(buft);
}

static void neuron_host_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    free(buffer->context);
}

static ggml_backend_buffer_t neuron_host_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * data = aligned_alloc(PAGE, GGML_PAD(size ? size : 1, PAGE));
    if (!data) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(data, size);
    buffer->buft                 = buft;
    buffer->iface.free_buffer    = neuron_host_buffer_free_buffer;
    return buffer;
}

ggml_backend_buffer_type_t neuron_host_buffer_type(ggml_backend_dev_t dev) {
    // one for all cores, whose device is the first that asked
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {
                          /* .get_name       = */ neuron_host_buffer_type_get_name,
                          /* .alloc_buffer   = */ neuron_host_buffer_type_alloc_buffer,
                          /* .get_alignment  = */ ggml_backend_cpu_buffer_type()->iface.get_alignment,
                          /* .get_max_size   = */ NULL,
                          /* .get_alloc_size = */ ggml_backend_cpu_buffer_type()->iface.get_alloc_size,
                          /* .is_host        = */ ggml_backend_cpu_buffer_type()->iface.is_host,
                          },
        /* .device  = */
        dev,
        /* .context = */ NULL,
    };
    return &type;
}
