#include "ggml/host_buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml/buffers.h"
#include "report/log.h"
#include "report/metrics.h"
#include "select/kernel_store.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

static constexpr size_t PAGE = 4096;

//
// for inputs and outputs
//

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
    // one for all cores; its device is the first caller's
    static ggml_backend_buffer_type type = [dev] {
        ggml_backend_buffer_type of_cpu = *ggml_backend_cpu_buffer_type();
        of_cpu.iface.get_name           = neuron_host_buffer_type_get_name;
        of_cpu.iface.alloc_buffer       = neuron_host_buffer_type_alloc_buffer;
        of_cpu.device                   = dev;
        return of_cpu;
    }();
    return &type;
}

//
// with copies on cores
//

namespace {

// A core's copy of a tensor.
struct kept_copy {
    const char *    begin;  // of the tensor
    size_t          size;
    neuron_memory * memory;
};

struct kept_buffer {
    void * data  = nullptr;
    bool   owned = false;

    // Locked after a core's mutex.
    std::mutex                mutex;
    std::vector<kept_copy>    copies;
    std::vector<const void *> written;  // tensors that ops write to
};

}  // namespace

// Frees the copies of tensors that have bytes in a range.
static void drop_copies(kept_buffer & kept, const void * data, size_t size) {
    std::vector<kept_copy> dropped;
    {
        const std::lock_guard<std::mutex> lock(kept.mutex);
        const auto                        begin = (const char *) data;
        const auto stays = std::stable_partition(kept.copies.begin(), kept.copies.end(), [&](const kept_copy & c) {
            return c.begin + c.size <= begin || begin + size <= c.begin;
        });
        dropped.assign(stays, kept.copies.end());
        kept.copies.erase(stays, kept.copies.end());
    }
    for (const kept_copy & c : dropped) {
        neuron_core &                     core = *c.memory->core;
        const std::lock_guard<std::mutex> lock(core.graph_mutex);  // no thread is launching a graph that uses it
        core.free(c.memory);
    }
}

static void neuron_kept_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    auto * kept = (kept_buffer *) buffer->context;
    drop_copies(*kept, kept->data, buffer->size);
    if (kept->owned) {
        free(kept->data);
    }
    delete kept;
}

static void * neuron_kept_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((kept_buffer *) buffer->context)->data;
}

// Call this before bytes change.
static void note_write(ggml_backend_buffer_t buffer, const void * data, size_t size) {
    drop_copies(*(kept_buffer *) buffer->context, data, size);
}

static enum ggml_status neuron_kept_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    memset((char *) tensor->data + ggml_nbytes(tensor), 0, neuron_tail_of(tensor));
    return GGML_STATUS_SUCCESS;

    GGML_UNUSED(buffer);
}

static void neuron_kept_buffer_memset_tensor(ggml_backend_buffer_t buffer,
                                             ggml_tensor *         tensor,
                                             uint8_t               value,
                                             size_t                offset,
                                             size_t                size) {
    note_write(buffer, (char *) tensor->data + offset, size);
    memset((char *) tensor->data + offset, value, size);
}

static void neuron_kept_buffer_set_tensor(ggml_backend_buffer_t buffer,
                                          ggml_tensor *         tensor,
                                          const void *          data,
                                          size_t                offset,
                                          size_t                size) {
    note_write(buffer, (char *) tensor->data + offset, size);
    memcpy((char *) tensor->data + offset, data, size);
}

static void neuron_kept_buffer_get_tensor(ggml_backend_buffer_t buffer,
                                          const ggml_tensor *   tensor,
                                          void *                data,
                                          size_t                offset,
                                          size_t                size) {
    memcpy(data, (const char *) tensor->data + offset, size);

    GGML_UNUSED(buffer);
}

static bool neuron_kept_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_backend_buffer_t from = neuron_buffer_of_root(src);
    if (!ggml_backend_buffer_is_host(from)) {
        return false;
    }
    note_write(buffer, dst->data, ggml_nbytes(src));
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

static void neuron_kept_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    void * data = ((kept_buffer *) buffer->context)->data;
    note_write(buffer, data, buffer->size);
    memset(data, value, buffer->size);
}

static constexpr struct ggml_backend_buffer_i neuron_kept_buffer_i = [] {
    struct ggml_backend_buffer_i i = {};
    i.free_buffer                  = neuron_kept_buffer_free_buffer;
    i.get_base                     = neuron_kept_buffer_get_base;
    i.init_tensor                  = neuron_kept_buffer_init_tensor;
    i.memset_tensor                = neuron_kept_buffer_memset_tensor;
    i.set_tensor                   = neuron_kept_buffer_set_tensor;
    i.get_tensor                   = neuron_kept_buffer_get_tensor;
    i.cpy_tensor                   = neuron_kept_buffer_cpy_tensor;
    i.clear                        = neuron_kept_buffer_clear;
    return i;
}();

static ggml_backend_buffer_t make_kept_buffer(ggml_backend_buffer_type_t buft, void * data, size_t size, bool owned) {
    auto * kept = new kept_buffer;
    kept->data  = data;
    kept->owned = owned;
    return ggml_backend_buffer_init(buft, neuron_kept_buffer_i, kept, size);
}

static const char * neuron_kept_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    return (const char *) buft->context;
}

static ggml_backend_buffer_t neuron_kept_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * data = aligned_alloc(PAGE, GGML_PAD(size ? size : 1, PAGE));
    if (!data) {
        NEURON_ERROR("no buffer of %zu bytes in host memory\n", size);
        return NULL;
    }
    return make_kept_buffer(buft, data, size, true);
}

static size_t neuron_kept_buffer_type_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    return ggml_nbytes(t) + neuron_tail_of(t);

    GGML_UNUSED(buft);
}

ggml_backend_buffer_type neuron_kept_buffer_type(ggml_backend_dev_t dev, const char * name) {
    ggml_backend_buffer_type type = *ggml_backend_cpu_buffer_type();
    type.iface.get_name           = neuron_kept_buffer_type_get_name;
    type.iface.alloc_buffer       = neuron_kept_buffer_type_alloc_buffer;
    type.iface.get_alloc_size     = neuron_kept_buffer_type_get_alloc_size;
    type.device                   = dev;
    type.context                  = (void *) name;
    return type;
}

ggml_backend_buffer_t neuron_kept_buffer_from_ptr(ggml_backend_buffer_type_t buft, void * data, size_t size) {
    return make_kept_buffer(buft, data, size, false);
}

// Returns the buffer that tracks a tensor's copies, or NULL.
static kept_buffer * kept_buffer_of(const ggml_tensor * root) {
    const bool known = root->buffer && root->buffer->iface.free_buffer == neuron_kept_buffer_free_buffer;
    return known ? (kept_buffer *) root->buffer->context : nullptr;
}

bool neuron_locate_kept(neuron_core &           core,
                        const ggml_tensor *     t,
                        const neuron_programs & programs,
                        neuron_operand &        operand) {
    const ggml_tensor * root = neuron_root_of(t);
    kept_buffer *       kept = kept_buffer_of(root);
    // ops of other backends also write to trained weights
    if (!kept || root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS || root->op != GGML_OP_NONE ||
        (root->flags & GGML_TENSOR_FLAG_PARAM) != 0 || (t != root && !neuron_is_view_op(t->op)) || ggml_is_empty(t)) {
        return false;
    }
    const auto   begin  = (const char *) root->data;
    const size_t size   = ggml_nbytes(root);
    const auto   offset = (size_t) ((const char *) t->data - begin);
    if (size > NEURON_MAX_TENSOR || offset + ggml_nbytes(t) > size) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(kept->mutex);
    if (std::find(kept->written.begin(), kept->written.end(), begin) != kept->written.end()) {
        return false;
    }
    const auto      found  = std::find_if(kept->copies.begin(), kept->copies.end(), [&](const kept_copy & c) {
        return c.memory->core == &core && c.begin == begin && c.size == size;
    });
    neuron_memory * memory = found != kept->copies.end() ? found->memory : nullptr;
    if (!memory) {
        memory = core.allocate_spare(size, programs);
        if (!memory) {
            return false;
        }
        if (memory->write_locked(begin, 0, size) != NRT_SUCCESS) {
            core.free_locked(memory);
            return false;
        }
        g_metrics.kept.fetch_add(size, std::memory_order_relaxed);
        kept->copies.push_back({ begin, size, memory });
    }
    operand = { memory, offset, ggml_nbytes(t) };
    return true;
}

void neuron_note_writes(const ggml_tensor * op) {
    const auto note = [](const ggml_tensor * root) {
        kept_buffer * kept = kept_buffer_of(root);
        if (!kept || root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(kept->mutex);
            if (std::find(kept->written.begin(), kept->written.end(), root->data) != kept->written.end()) {
                return;
            }
            kept->written.push_back(root->data);
        }
        drop_copies(*kept, root->data, ggml_nbytes(root));
    };
    if (op->view_src && !neuron_is_view_op(op->op)) {
        note(op->view_src);
    }
    const uint32_t updates = neuron_updates_of(op);
    for (int i = 0; updates && i < GGML_MAX_SRC; i++) {
        if ((updates >> i & 1) && op->src[i]) {
            note(neuron_root_of(op->src[i]));
        }
    }
}
