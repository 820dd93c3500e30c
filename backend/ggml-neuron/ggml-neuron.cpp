#include "ggml-neuron.h"

#include "census.h"
#include "core.h"
#include "cpu.h"
#include "forms.h"
#include "fusion.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "group_plan.h"
#include "groups.h"
#include "host_buffer.h"
#include "kernels.h"
#include "log.h"
#include "nrt.h"
#include "plan.h"
#include "record.h"
#include "record_graphs.h"
#include "variables.h"
#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

//
// what the devices share
//

// Where tensors live. Chosen once, for all devices.
enum class neuron_buffers {
    DEVICE,  // in device memory
    HOST,    // in host memory, and copied for each op
};

// A buffer type of device memory.
struct ggml_backend_neuron_buffer_type {
    neuron_buffer_type_context context;
    ggml_backend_buffer_type   buft{};
};

struct ggml_backend_neuron_device_context {
    std::string                  name;
    std::string                  description;
    std::unique_ptr<neuron_core> core;
    neuron_fusion                fusion;

    // By form: the first is for all tensors, the others are for weights.
    ggml_backend_neuron_buffer_type buffer_types[NEURON_KERNELS_LAST_FORM + 1];

    // Those for weights that some kernel takes, then NULL.
    std::vector<ggml_backend_buffer_type_t> extra_bufts;

    explicit ggml_backend_neuron_device_context(const neuron_kernel_store & kernels) : fusion(kernels) {}
};

struct ggml_backend_neuron_reg_context {
    const neuron_nrt *                                               nrt = nullptr;
    neuron_kernel_store                                              kernels;
    neuron_buffers                                                   buffers = neuron_buffers::HOST;
    std::vector<std::unique_ptr<ggml_backend_neuron_device_context>> contexts;
    std::vector<ggml_backend_device>                                 devices;
};

static ggml_backend_neuron_reg_context & ggml_backend_neuron_shared();

// Nodes computed, by op, for GGML_NEURON_LOG.
static struct ggml_backend_neuron_counts {
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> device{};
    std::array<std::atomic<uint64_t>, GGML_OP_COUNT> cpu{};
    std::atomic<uint64_t>                            moves{ 0 };

    // Of groups.
    std::atomic<uint64_t>                                     launches{ 0 };
    std::atomic<uint64_t>                                     grouped{ 0 };  // ops in them
    std::array<std::atomic<uint64_t>, NEURON_UNGROUPED_COUNT> outside{};     // other ops, by reason

    // Of ops that kernels for other numbers of tokens computed.
    std::atomic<uint64_t> pieces{ 0 };
    std::atomic<uint64_t> padding{ 0 };  // rows beyond the ops' own, or computed twice

    ~ggml_backend_neuron_counts() {
        const auto print = [](const char * where, const auto & counts) {
            uint64_t    total = 0;
            std::string ops;
            for (int op = 0; op < GGML_OP_COUNT; op++) {
                const uint64_t n = counts[op];
                total += n;
                if (n) {
                    ops += (ops.empty() ? " " : ", ") + std::to_string(n) + " " + ggml_op_name((ggml_op) op);
                }
            }
            NEURON_LOG("%llu ops ran on %s%s%s\n", (unsigned long long) total, where, total ? ":" : "", ops.c_str());
        };
        print("NeuronCores", device);
        print("the CPU instead of a NeuronCore", cpu);
        print_groups();
        if (pieces) {
            NEURON_LOG("kernels for other numbers of tokens were launched %llu times, with %llu rows of padding\n",
                       (unsigned long long) pieces.load(), (unsigned long long) padding.load());
        }
        if (moves) {
            NEURON_LOG("%llu copies kept results apart from inputs, or gave kernels more rows\n",
                       (unsigned long long) moves.load());
        }
    }

    void print_groups() const {
        uint64_t    others = 0;
        std::string reasons;
        for (int reason = 0; reason < NEURON_UNGROUPED_COUNT; reason++) {
            const uint64_t n = outside[reason];
            others += n;
            if (n) {
                reasons +=
                    (reasons.empty() ? ": " : "; ") + std::to_string(n) + " because " + neuron_ungrouped_name(reason);
            }
        }
        if (launches) {
            NEURON_LOG("%llu ops ran in groups, in %llu launches, %.1f ops each\n", (unsigned long long) grouped.load(),
                       (unsigned long long) launches.load(), (double) grouped / (double) launches);
        }
        if (others) {
            NEURON_LOG("%llu ops were in no group%s\n", (unsigned long long) others, reasons.c_str());
        }
    }
} g_counts;

//
// buffer type
//

static ggml_backend_buffer_t ggml_backend_neuron_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);

static size_t ggml_backend_neuron_buffer_type_get_alignment(ggml_backend_buffer_type_t buft) {
    return NEURON_ALIGNMENT;

    GGML_UNUSED(buft);
}

// ggml splits what is larger. Releases of libnrt before 2.28 compute sizes of 4 GiB and more wrongly.
static size_t ggml_backend_neuron_buffer_type_get_max_size(ggml_backend_buffer_type_t buft) {
    return (size_t) 2 << 30;

    GGML_UNUSED(buft);
}

static const struct ggml_backend_buffer_type_i ggml_backend_neuron_buffer_type_i = {
    /* .get_name         = */ neuron_buffer_type_get_name,
    /* .alloc_buffer     = */ ggml_backend_neuron_buffer_type_alloc_buffer,
    /* .get_alignment    = */ ggml_backend_neuron_buffer_type_get_alignment,
    /* .get_max_size     = */ ggml_backend_neuron_buffer_type_get_max_size,
    /* .get_alloc_size   = */ NULL,
    /* .is_host          = */ NULL,
};

static bool ggml_backend_buft_is_neuron(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == neuron_buffer_type_get_name;
}

//
// buffer
//

struct ggml_backend_neuron_buffer_context {
    neuron_core *   core   = nullptr;
    neuron_memory * memory = nullptr;

    // ggml computes addresses within a buffer and compares them. These are reserved and can't be accessed, so that they
    // are nobody else's, and whoever takes them for host memory fails at once.
    char * base     = nullptr;
    size_t reserved = 0;

    ~ggml_backend_neuron_buffer_context() {
        if (memory) {
            core->free(memory);
        }
        if (base) {
            munmap(base, reserved);
        }
    }

    size_t offset_of(const ggml_tensor * tensor) const { return (size_t) ((const char *) tensor->data - base); }

    // Held while a tensor in a form is changed: what does not begin and end at its units is read first.
    std::mutex packing;
};

static void ggml_backend_neuron_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    delete (ggml_backend_neuron_buffer_context *) buffer->context;
}

static void * ggml_backend_neuron_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((ggml_backend_neuron_buffer_context *) buffer->context)->base;
}

// Ends the program when data did not get where it should be, as ggml-cuda does: ggml has no way to be told, and would go on
// with other numbers.
static void ggml_backend_neuron_require(const std::string & failure, const char * doing, const ggml_tensor * tensor) {
    if (!failure.empty()) {
        const std::string what = tensor ? std::string(doing) + " tensor '" + tensor->name + "'" : doing;
        GGML_ABORT("ggml-neuron: %s: %s", what.c_str(), failure.c_str());
    }
}

// Bytes that are brought from one form to another at once, unless a unit has more.
static constexpr size_t PACK_CHUNK = (size_t) 4 << 20;

// Where bytes of a tensor that is in a form are.
struct ggml_backend_neuron_packed {
    neuron_form form;
    size_t      begin;  // of the tensor in the buffer
    size_t      first;  // byte that is asked for, in the tensor
    size_t      last;   // behind the last such byte

    // `address` is what ggml says where the bytes are.
    ggml_backend_neuron_packed(const char * base, const ggml_tensor * tensor, const void * address, size_t size) :
        form(tensor) {
        const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
        begin                    = (size_t) ((const char *) root->data - base);
        first                    = (size_t) ((const char *) address - (const char *) root->data);
        last                     = first + size;
    }

    // Calls use(first byte, bytes) for units in turn, from the one with the first byte to the one with the last, as long as it
    // returns "".
    template <typename F> std::string for_each_chunk(F use) const {
        const size_t unit  = form.unit();
        const size_t chunk = std::max(PACK_CHUNK / unit, (size_t) 1) * unit;
        const size_t end   = (last + unit - 1) / unit * unit;
        std::string  failure;
        for (size_t at = first / unit * unit; at < end && failure.empty(); at += chunk) {
            failure = use(at, std::min(chunk, end - at));
        }
        return failure;
    }
};

// Reads bytes of a tensor that is in a form, as ggml has them; returns "" when it worked.
static std::string ggml_backend_neuron_read_packed(const ggml_backend_neuron_packed &                         p,
                                                   uint8_t *                                                  data,
                                                   const std::function<std::string(void *, size_t, size_t)> & read) {
    std::vector<uint8_t> packed;
    std::vector<uint8_t> plain;
    return p.for_each_chunk([&](size_t at, size_t size) {
        packed.resize(size);
        plain.resize(size);
        const std::string failure = read(packed.data(), p.begin + at, size);
        if (failure.empty()) {
            p.form.unpack(packed.data(), plain.data(), size / p.form.unit());
            const size_t from = std::max(at, p.first);
            const size_t to   = std::min(at + size, p.last);
            memcpy(data + (from - p.first), plain.data() + (from - at), to - from);
        }
        return failure;
    });
}

// Writes bytes of a tensor that is in a form; returns "" when it worked.
static std::string ggml_backend_neuron_write_packed(ggml_backend_neuron_buffer_context & ctx,
                                                    const ggml_backend_neuron_packed &   p,
                                                    const uint8_t *                      data) {
    const std::lock_guard<std::mutex> lock(ctx.packing);
    std::vector<uint8_t>              packed;
    std::vector<uint8_t>              plain;
    return p.for_each_chunk([&](size_t at, size_t size) {
        const size_t    n_units = size / p.form.unit();
        const size_t    from    = std::max(at, p.first);
        const size_t    to      = std::min(at + size, p.last);
        const uint8_t * given   = data + (from - p.first);
        packed.resize(size);
        if (to - from < size) {  // the rest stays as it is
            plain.resize(size);
            const std::string failure = ctx.memory->read(packed.data(), p.begin + at, size);
            if (!failure.empty()) {
                return failure;
            }
            p.form.unpack(packed.data(), plain.data(), n_units);
            memcpy(plain.data() + (from - at), given, to - from);
            given = plain.data();
        }
        p.form.pack(given, packed.data(), n_units);
        return ctx.memory->write(packed.data(), p.begin + at, size);
    });
}

static void ggml_backend_neuron_buffer_memset_tensor(ggml_backend_buffer_t buffer,
                                                     ggml_tensor *         tensor,
                                                     uint8_t               value,
                                                     size_t                offset,
                                                     size_t                size) {
    auto *                           ctx = (ggml_backend_neuron_buffer_context *) buffer->context;
    const ggml_backend_neuron_packed packed(ctx->base, tensor, (const char *) tensor->data + offset, size);
    if (packed.form) {
        const std::vector<uint8_t> data(size, value);
        ggml_backend_neuron_require(ggml_backend_neuron_write_packed(*ctx, packed, data.data()), "setting", tensor);
        return;
    }
    ggml_backend_neuron_require(ctx->memory->set(value, ctx->offset_of(tensor) + offset, size), "setting", tensor);
}

static void ggml_backend_neuron_buffer_set_tensor(ggml_backend_buffer_t buffer,
                                                  ggml_tensor *         tensor,
                                                  const void *          data,
                                                  size_t                offset,
                                                  size_t                size) {
    auto *                           ctx = (ggml_backend_neuron_buffer_context *) buffer->context;
    const ggml_backend_neuron_packed packed(ctx->base, tensor, (const char *) tensor->data + offset, size);
    if (packed.form) {
        ggml_backend_neuron_require(ggml_backend_neuron_write_packed(*ctx, packed, (const uint8_t *) data), "writing",
                                    tensor);
        return;
    }
    ggml_backend_neuron_require(ctx->memory->write(data, ctx->offset_of(tensor) + offset, size), "writing", tensor);
}

static void ggml_backend_neuron_buffer_get_tensor(ggml_backend_buffer_t buffer,
                                                  const ggml_tensor *   tensor,
                                                  void *                data,
                                                  size_t                offset,
                                                  size_t                size) {
    auto *                           ctx = (ggml_backend_neuron_buffer_context *) buffer->context;
    const ggml_backend_neuron_packed packed(ctx->base, tensor, (const char *) tensor->data + offset, size);
    if (packed.form) {
        const auto read = [ctx](void * to, size_t at, size_t n) {
            return ctx->memory->read(to, at, n);
        };
        ggml_backend_neuron_require(ggml_backend_neuron_read_packed(packed, (uint8_t *) data, read), "reading", tensor);
        return;
    }
    ggml_backend_neuron_require(ctx->memory->read(data, ctx->offset_of(tensor) + offset, size), "reading", tensor);
}

// Returns the buffer's context when a tensor is in device memory, else NULL.
static ggml_backend_neuron_buffer_context * ggml_backend_neuron_buffer_context_of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (!buffer || !ggml_backend_buft_is_neuron(buffer->buft)) {
        return nullptr;
    }
    return (ggml_backend_neuron_buffer_context *) buffer->context;  // NULL for the dummy buffers of size 0
}

static bool ggml_backend_neuron_buffer_cpy_tensor(ggml_backend_buffer_t buffer,
                                                  const ggml_tensor *   src,
                                                  ggml_tensor *         dst) {
    auto * to   = (ggml_backend_neuron_buffer_context *) buffer->context;
    auto * from = ggml_backend_neuron_buffer_context_of(src);
    if (!from || from->core != to->core) {
        return false;  // the runtime copies between tensors of one core only
    }
    if (neuron_form(src) || neuron_form(dst)) {
        return false;  // ggml reads the one and writes the other, each in ggml's order
    }
    std::lock_guard<std::mutex> lock(to->core->mutex);
    const size_t                size = ggml_nbytes(src);
    return to->core->copy({ from->memory, from->offset_of(src), size }, { to->memory, to->offset_of(dst), size }) ==
           NRT_SUCCESS;
}

static void ggml_backend_neuron_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    auto * ctx = (ggml_backend_neuron_buffer_context *) buffer->context;
    ggml_backend_neuron_require(ctx->memory->set(value, 0, ctx->memory->size), "clearing a buffer", nullptr);
}

static const struct ggml_backend_buffer_i ggml_backend_neuron_buffer_i = {
    /* .free_buffer     = */ ggml_backend_neuron_buffer_free_buffer,
    /* .get_base        = */ ggml_backend_neuron_buffer_get_base,
    /* .init_tensor     = */ NULL,
    /* .memset_tensor   = */ ggml_backend_neuron_buffer_memset_tensor,
    /* .set_tensor      = */ ggml_backend_neuron_buffer_set_tensor,
    /* .get_tensor      = */ ggml_backend_neuron_buffer_get_tensor,
    /* .set_tensor_2d   = */ NULL,
    /* .get_tensor_2d   = */ NULL,
    /* .cpy_tensor      = */ ggml_backend_neuron_buffer_cpy_tensor,
    /* .clear           = */ ggml_backend_neuron_buffer_clear,
    /* .reset           = */ NULL,
};

static ggml_backend_buffer_t ggml_backend_neuron_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft,
                                                                          size_t                     size) {
    auto * device = ((neuron_buffer_type_context *) buft->context)->device;
    auto   ctx    = std::make_unique<ggml_backend_neuron_buffer_context>();
    ctx->core     = device->core.get();
    ctx->reserved = std::max<size_t>(size, 1);
    void * base   = mmap(NULL, ctx->reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        NEURON_ERROR("%s: no address range of %zu bytes\n", device->name.c_str(), size);
        return NULL;
    }
    ctx->base   = (char *) base;
    ctx->memory = ctx->core->allocate(ctx->reserved);
    if (!ctx->memory) {
        NEURON_ERROR("%s: no buffer of %.2f MiB in device memory\n", device->name.c_str(), size / 1024.0 / 1024.0);
        return NULL;
    }
    return ggml_backend_buffer_init(buft, ggml_backend_neuron_buffer_i, ctx.release(), size);
}

// Tells the planner where a tensor is: see neuron_locate_t.
static bool ggml_backend_neuron_locate(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand) {
    operand.size = ggml_nbytes(t);
    if (auto * ctx = ggml_backend_neuron_buffer_context_of(t)) {
        operand.memory = ctx->memory;
        operand.offset = ctx->offset_of(t);
        return ctx->core == &core && operand.offset + operand.size <= ctx->memory->size;
    }
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return t->data && (!buffer || ggml_backend_buffer_is_host(buffer));
}

// Returns whether the core computes with a tensor where it is: see neuron_holds_t.
static bool ggml_backend_neuron_holds(const neuron_core & core, const ggml_tensor * t) {
    const auto * ctx = ggml_backend_neuron_buffer_context_of(t);
    return ggml_backend_neuron_shared().buffers == neuron_buffers::HOST || (ctx && ctx->core == &core);
}

//
// backend
//

struct ggml_backend_neuron_context {
    ggml_backend_neuron_device_context * device;
    neuron_planner                       planner;
    neuron_census                        census;
    std::atomic<bool>                    computed{ false };  // a graph
    neuron_stream                        stream;
};

static enum ggml_status ggml_backend_neuron_status(NRT_STATUS status) {
    return status == NRT_RESOURCE || status == NRT_FAIL_HOST_MEM_ALLOC ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

// locked
static enum ggml_status ggml_backend_neuron_compute_on_cpu(neuron_core & core, ggml_tensor * node) {
    const auto offset = [](const ggml_tensor * owner, const void * address) {
        return (size_t) ((const char *) address - ggml_backend_neuron_buffer_context_of(owner)->base);
    };
    neuron_host_access access;
    access.is_device = [](const ggml_tensor * t) {
        return ggml_backend_neuron_buffer_context_of(t) != nullptr;
    };
    access.read = [&](const ggml_tensor * owner, const void * address, void * data, size_t size) {
        auto * ctx = ggml_backend_neuron_buffer_context_of(owner);
        if (ctx->core != &core) {
            return false;
        }
        const auto read = [ctx](void * to, size_t at, size_t n) {
            return ctx->memory->read_locked(to, at, n) == NRT_SUCCESS ? std::string() : "it can't be read";
        };
        const ggml_backend_neuron_packed packed(ctx->base, owner, address, size);
        return packed.form ? ggml_backend_neuron_read_packed(packed, (uint8_t *) data, read).empty()
                           : read(data, offset(owner, address), size).empty();
    };
    access.write = [&](const ggml_tensor * owner, const void * address, const void * data, size_t size) {
        auto * ctx = ggml_backend_neuron_buffer_context_of(owner);
        if (neuron_form(owner)) {
            NEURON_ERROR("%s is a weight in a form of its own, which no op can write to\n", owner->name);
            return false;
        }
        return ctx->core == &core && ctx->memory->write_locked(data, offset(owner, address), size) == NRT_SUCCESS;
    };
    g_counts.cpu[node->op]++;
    neuron_note_executed(node);
    return neuron_compute_on_cpu(node, access);
}

// locked
static enum ggml_status ggml_backend_neuron_set_zero(const neuron_core & core, const ggml_tensor * node) {
    neuron_operand result;
    if (!ggml_backend_neuron_locate(core, node, result)) {
        return GGML_STATUS_FAILED;
    }
    if (!result.memory) {
        memset(node->data, 0, result.size);
        return GGML_STATUS_SUCCESS;
    }
    const NRT_STATUS status = result.memory->set_locked(0, result.offset, result.size);
    return status == NRT_SUCCESS ? GGML_STATUS_SUCCESS : ggml_backend_neuron_status(status);
}

// locked. Writes a mask as kernels for a longer cache want it: what is beyond the node's cache is hidden.
static NRT_STATUS ggml_backend_neuron_lengthen_mask(const neuron_long_mask & m) {
    std::vector<uint8_t> data;
    const auto *         from = (const uint8_t *) m.mask->data;
    if (m.from.memory) {
        data.resize(m.from.size);
        const NRT_STATUS status = m.from.memory->read_locked(data.data(), m.from.offset, data.size());
        if (status != NRT_SUCCESS) {
            return status;
        }
        from = data.data();
    }
    const std::vector<uint8_t> longer = neuron_lengthen_mask(m.mask, from, m.n_more, m.rows);
    return m.to.memory->write_locked(longer.data(), m.to.offset, longer.size());
}

// locked
static NRT_STATUS ggml_backend_neuron_lengthen_masks(const neuron_planned_node & planned) {
    NRT_STATUS status = NRT_SUCCESS;
    for (size_t i = 0; i < planned.masks.size() && status == NRT_SUCCESS; i++) {
        status = ggml_backend_neuron_lengthen_mask(planned.masks[i]);
    }
    return status;
}

// locked
static enum ggml_status ggml_backend_neuron_compute_group(neuron_core &               core,
                                                          neuron_stream &             stream,
                                                          const neuron_planned_node & planned) {
    const neuron_planned_group & group  = *planned.group;
    NRT_STATUS                   status = ggml_backend_neuron_lengthen_masks(planned);
    for (size_t i = 0; i < group.uploads.size() && status == NRT_SUCCESS; i++) {
        const neuron_group_transfer & u = group.uploads[i];
        status                          = u.core.memory->write_locked(u.host, u.core.offset, u.core.size);
    }
    for (size_t i = 0; i < group.before.size() && status == NRT_SUCCESS; i++) {
        status = core.copy(group.before[i].from, group.before[i].to);
    }
    if (status == NRT_SUCCESS) {
        status = core.execute(*group.step, stream, group.members.back().node->name);
    }
    for (size_t i = 0; i < group.after.size() && status == NRT_SUCCESS; i++) {
        status = core.copy(group.after[i].from, group.after[i].to);
    }
    for (size_t i = 0; i < group.downloads.size() && status == NRT_SUCCESS; i++) {
        const neuron_group_transfer & d = group.downloads[i];
        status                          = d.core.memory->read_locked(d.host, d.core.offset, d.core.size);
    }
    if (status != NRT_SUCCESS) {
        return ggml_backend_neuron_status(status);
    }
    for (const neuron_group_member & member : group.members) {
        g_counts.device[member.node->op].fetch_add(1, std::memory_order_relaxed);
    }
    g_counts.launches.fetch_add(1, std::memory_order_relaxed);
    g_counts.grouped.fetch_add(group.members.size(), std::memory_order_relaxed);
    g_counts.moves.fetch_add(group.before.size() + group.after.size(), std::memory_order_relaxed);
    if (group.longer) {
        g_counts.pieces.fetch_add(1, std::memory_order_relaxed);
        g_counts.padding.fetch_add((uint64_t) group.padding, std::memory_order_relaxed);
    }
    group.launches->fetch_add(1, std::memory_order_relaxed);
    return GGML_STATUS_SUCCESS;
}

// locked
static enum ggml_status ggml_backend_neuron_compute(neuron_core &               core,
                                                    neuron_stream &             stream,
                                                    const neuron_planned_node & planned) {
    if (planned.group) {
        return ggml_backend_neuron_compute_group(core, stream, planned);
    }
    if (planned.later) {
        g_counts.device[planned.node->op].fetch_add(1, std::memory_order_relaxed);
        return GGML_STATUS_SUCCESS;
    }
    if (planned.steps.empty()) {
        return neuron_is_zero(planned.node) ? ggml_backend_neuron_set_zero(core, planned.node)
                                            : ggml_backend_neuron_compute_on_cpu(core, planned.node);
    }
    const NRT_STATUS masked = ggml_backend_neuron_lengthen_masks(planned);
    if (masked != NRT_SUCCESS) {
        return ggml_backend_neuron_status(masked);
    }
    for (const neuron_upload & u : planned.uploads) {
        const NRT_STATUS status = u.to.memory->write_locked(u.from->data, u.to.offset, u.to.size);
        if (status != NRT_SUCCESS) {
            return ggml_backend_neuron_status(status);
        }
    }
    for (const neuron_move & m : planned.before) {
        const NRT_STATUS status = core.copy(m.from, m.to);
        if (status != NRT_SUCCESS) {
            return ggml_backend_neuron_status(status);
        }
    }
    for (neuron_step * step : planned.steps) {
        const NRT_STATUS status = core.execute(*step, stream, planned.node->name);
        if (status != NRT_SUCCESS) {
            return ggml_backend_neuron_status(status);
        }
    }
    for (const neuron_move & m : planned.after) {
        const NRT_STATUS status = core.copy(m.from, m.to);
        if (status != NRT_SUCCESS) {
            return ggml_backend_neuron_status(status);
        }
    }
    for (const neuron_download & d : planned.downloads) {
        const NRT_STATUS status = d.from.memory->read_locked(d.to->data, d.from.offset, d.from.size);
        if (status != NRT_SUCCESS) {
            return ggml_backend_neuron_status(status);
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

static const char * ggml_backend_neuron_get_name(ggml_backend_t backend) {
    return ((ggml_backend_neuron_context *) backend->context)->device->name.c_str();
}

static void ggml_backend_neuron_synchronize(ggml_backend_t backend) {
    auto *                      ctx  = (ggml_backend_neuron_context *) backend->context;
    neuron_core &               core = *ctx->device->core;
    std::lock_guard<std::mutex> lock(core.mutex);
    core.flights.wait_for(ctx->stream);
}

// Whether a graph may still be computed when it was given to a backend: tensors in host memory are computed with before that.
static bool ggml_backend_neuron_is_async(const ggml_backend_neuron_device_context * device) {
    return ggml_backend_neuron_shared().buffers == neuron_buffers::DEVICE && device->core->flights.is_queue();
}

// These wait for the launches that use the tensor's memory, and for no others; then the data has been copied when they return.
static void ggml_backend_neuron_set_tensor_async(ggml_backend_t backend,
                                                 ggml_tensor *  tensor,
                                                 const void *   data,
                                                 size_t         offset,
                                                 size_t         size) {
    ggml_backend_tensor_set(tensor, data, offset, size);

    GGML_UNUSED(backend);
}

static void ggml_backend_neuron_get_tensor_async(ggml_backend_t      backend,
                                                 const ggml_tensor * tensor,
                                                 void *              data,
                                                 size_t              offset,
                                                 size_t              size) {
    ggml_backend_tensor_get(tensor, data, offset, size);

    GGML_UNUSED(backend);
}

// Copies from a NeuronCore, or from host memory, to a NeuronCore. Between cores the way leads through the host: the runtime copies
// between tensors of one core only.
static bool ggml_backend_neuron_cpy_tensor_async(ggml_backend_t      backend_src,
                                                 ggml_backend_t      backend_dst,
                                                 const ggml_tensor * src,
                                                 ggml_tensor *       dst) {
    auto *                      to     = ggml_backend_neuron_buffer_context_of(dst);
    auto *                      from   = ggml_backend_neuron_buffer_context_of(src);
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
        ggml_backend_neuron_require(from->memory->read(data.data(), from->offset_of(src), size), "reading", src);
        ggml_backend_neuron_require(to->memory->write(data.data(), to->offset_of(dst), size), "writing", dst);
        return true;
    }
    // what another backend computes into host memory, it may not have computed yet
    if (!buffer || !ggml_backend_buffer_is_host(buffer)) {
        return false;
    }
    ggml_backend_synchronize(backend_src);
    ggml_backend_neuron_require(to->memory->write(src->data, to->offset_of(dst), size), "writing", dst);
    return true;

    GGML_UNUSED(backend_dst);
}

//
// events
//

struct ggml_backend_neuron_event_context {
    neuron_core * core   = nullptr;
    uint64_t      number = 0;  // of the launch that is waited for; guarded by the core's mutex
};

static void ggml_backend_neuron_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    auto *                      ctx      = (ggml_backend_neuron_context *) backend->context;
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->number = ctx->stream.last;
}

static void ggml_backend_neuron_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    auto *                      recorded = (ggml_backend_neuron_event_context *) event->context;
    std::lock_guard<std::mutex> lock(recorded->core->mutex);
    recorded->core->flights.wait_for(recorded->number);

    GGML_UNUSED(dev);
}

// Launches of one core are computed in order, and the host waits for what it touches; what is launched on another core waits here.
static void ggml_backend_neuron_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    if (event->device != backend->device) {
        ggml_backend_event_synchronize(event);
    }
}

static ggml_backend_event_t ggml_backend_neuron_device_event_new(ggml_backend_dev_t dev) {
    auto * device = (ggml_backend_neuron_device_context *) dev->context;
    if (!ggml_backend_neuron_is_async(device)) {
        return NULL;
    }
    return new ggml_backend_event{
        /* .device  = */ dev,
        /* .context = */ new ggml_backend_neuron_event_context{ device->core.get(), 0 },
    };
}

static void ggml_backend_neuron_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    delete (ggml_backend_neuron_event_context *) event->context;
    delete event;

    GGML_UNUSED(dev);
}

static void ggml_backend_neuron_free(ggml_backend_t backend) {
    auto *            ctx     = (ggml_backend_neuron_context *) backend->context;
    const std::string summary = ctx->census.summary();
    if (!summary.empty()) {
        fprintf(stderr, "ggml-neuron: %s: %s\n", ctx->device->name.c_str(), summary.c_str());
    }
    ggml_backend_neuron_synchronize(backend);
    neuron_record_flush();
    neuron_record_graphs_flush();
    delete ctx;
    delete backend;
}

static enum ggml_status ggml_backend_neuron_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    auto *        ctx  = (ggml_backend_neuron_context *) backend->context;
    neuron_core & core = *ctx->device->core;
    if (neuron_recording_graphs()) {
        neuron_record_graph(cgraph);
    }
    std::lock_guard<std::mutex> graph_lock(core.graph_mutex);
    std::lock_guard<std::mutex> lock(core.mutex);
    ctx->computed = true;
    if (ctx->stream.failed != NRT_SUCCESS) {
        NEURON_ERROR(
            "%s: a launch of the last graph failed after its results were promised: this graph is not computed\n",
            ctx->device->name.c_str());
        return ggml_backend_neuron_status(core.finish(ctx->stream));
    }
    const neuron_plan * plan   = nullptr;
    enum ggml_status    status = ctx->planner.get(cgraph, &plan);
    if (status == GGML_STATUS_SUCCESS) {
        ctx->census.add(cgraph, *plan);
        for (int reason = 0; reason < NEURON_UNGROUPED_COUNT; reason++) {
            g_counts.outside[reason].fetch_add(plan->outside[reason], std::memory_order_relaxed);
        }
    }
    for (size_t i = 0; status == GGML_STATUS_SUCCESS && i < plan->nodes.size(); i++) {
        status = ggml_backend_neuron_compute(core, ctx->stream, plan->nodes[i]);
    }
    if (status != GGML_STATUS_SUCCESS) {
        core.finish(ctx->stream);
    }
    return status;
}

// Keeps what a group reads until all of it is computed: the allocator would free a tensor after its last reader, and give its
// memory to a result of the group.
static void ggml_backend_neuron_keep_slots(const ggml_cgraph *                         cgraph,
                                           const neuron_groups &                       groups,
                                           struct ggml_backend_graph_optimize_params * params) {
    for (const neuron_group & group : groups.groups) {
        for (const neuron_group_slot & slot : group.slots) {
            if (!slot.root->buffer && !slot.root->data) {
                params->add_alloc_dep(params->user_data, slot.root, cgraph->nodes[group.last()]);
            }
        }
    }
}

// Loads the programs of a graph. A context that is made has graphs optimized that it reserves memory for, the longest and those for one
// token, so that the first token does not have to wait for them.
static void ggml_backend_neuron_preload(const ggml_backend_neuron_context & ctx,
                                        const ggml_cgraph *                 cgraph,
                                        const neuron_groups &               groups) {
    const neuron_kernel_store & store = ggml_backend_neuron_shared().kernels;
    std::vector<neuron_kernel>  kernels;
    std::vector<bool>           grouped((size_t) cgraph->n_nodes, false);
    for (const neuron_group & group : groups.groups) {
        kernels.push_back(group.kernel);
        for (const int i : group.nodes) {
            grouped[(size_t) i] = true;
        }
    }
    for (int i = 0; i < cgraph->n_nodes; i++) {
        if (!grouped[(size_t) i] && neuron_is_work(cgraph->nodes[i])) {
            const neuron_service             service = store.serve(cgraph->nodes[i]);
            const std::vector<neuron_kernel> found =
                service ? neuron_kernels_of(service) : store.serve_in_chain(cgraph->nodes[i]);
            kernels.insert(kernels.end(), found.begin(), found.end());
        }
    }
    ctx.device->core->preload(kernels);
}

// Keeps the scheduler's allocator from giving a node the memory of one of its sources: a kernel's result must not overlap
// its inputs, and the copy that would keep them apart costs more than the memory.
static void ggml_backend_neuron_graph_optimize(ggml_backend_t                              backend,
                                               ggml_cgraph *                               cgraph,
                                               struct ggml_backend_graph_optimize_params * params) {
    auto *        ctx = (ggml_backend_neuron_context *) backend->context;
    neuron_groups groups;
    if (ctx->device->fusion.is_enabled()) {
        groups = neuron_find_groups(cgraph, ggml_backend_neuron_shared().kernels, false);
    }
    if (!ctx->computed) {
        ggml_backend_neuron_preload(*ctx, cgraph, groups);
    }
    if (ggml_backend_neuron_shared().buffers != neuron_buffers::DEVICE || !params || !params->add_alloc_dep) {
        return;
    }
    for (int i = 0; i < cgraph->n_nodes; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        if (!ggml_op_can_inplace(node->op) || node->view_src || neuron_is_view_op(node->op)) {
            continue;
        }
        for (ggml_tensor * src : node->src) {
            if (src && src->type == node->type && ggml_are_same_shape(src, node)) {
                params->add_alloc_dep(params->user_data, src, node);
            }
        }
    }
    ggml_backend_neuron_keep_slots(cgraph, groups, params);
}

static const struct ggml_backend_i ggml_backend_neuron_i = {
    /* .get_name                = */ ggml_backend_neuron_get_name,
    /* .free                    = */ ggml_backend_neuron_free,
    /* .set_tensor_async        = */ ggml_backend_neuron_set_tensor_async,
    /* .get_tensor_async        = */ ggml_backend_neuron_get_tensor_async,
    /* .set_tensor_2d_async     = */ NULL,
    /* .get_tensor_2d_async     = */ NULL,
    /* .cpy_tensor_async        = */ ggml_backend_neuron_cpy_tensor_async,
    /* .synchronize             = */ ggml_backend_neuron_synchronize,
    /* .graph_plan_create       = */ NULL,
    /* .graph_plan_free         = */ NULL,
    /* .graph_plan_update       = */ NULL,
    /* .graph_plan_compute      = */ NULL,
    /* .graph_compute           = */ ggml_backend_neuron_graph_compute,
    /* .event_record            = */ ggml_backend_neuron_event_record,
    /* .event_wait              = */ ggml_backend_neuron_event_wait,
    /* .graph_optimize          = */ ggml_backend_neuron_graph_optimize,
};

static ggml_guid_t ggml_backend_neuron_guid(void) {
    static ggml_guid guid = { 0x6e, 0x4b, 0x91, 0x0c, 0x2d, 0xf3, 0x47, 0x58,
                              0xa6, 0x1e, 0xb9, 0x70, 0x35, 0xc8, 0xd2, 0x14 };
    return &guid;
}

ggml_backend_t ggml_backend_neuron_init(size_t core) {
    ggml_backend_reg_t reg = ggml_backend_neuron_reg();
    if (core >= ggml_backend_reg_dev_count(reg)) {
        return NULL;
    }
    return ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, core), NULL);
}

bool ggml_backend_is_neuron(ggml_backend_t backend) {
    return backend != NULL && ggml_guid_matches(backend->guid, ggml_backend_neuron_guid());
}

//
// device
//

static const char * ggml_backend_neuron_device_get_name(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->name.c_str();
}

static const char * ggml_backend_neuron_device_get_description(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->description.c_str();
}

static void ggml_backend_neuron_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    neuron_core & core = *((ggml_backend_neuron_device_context *) dev->context)->core;
    core.memory_stats(ggml_backend_neuron_shared().kernels.n_neffs(), free, total);
}

static enum ggml_backend_dev_type ggml_backend_neuron_device_get_type(ggml_backend_dev_t dev) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;

    GGML_UNUSED(dev);
}

static void ggml_backend_neuron_device_get_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    props->name        = ggml_backend_neuron_device_get_name(dev);
    props->description = ggml_backend_neuron_device_get_description(dev);
    props->type        = ggml_backend_neuron_device_get_type(dev);
    ggml_backend_neuron_device_get_memory(dev, &props->memory_free, &props->memory_total);
    const bool in_host = ggml_backend_neuron_shared().buffers == neuron_buffers::HOST;
    const bool async   = ggml_backend_neuron_is_async((ggml_backend_neuron_device_context *) dev->context);
    props->caps        = {
        /* .async                 = */ async,
        /* .host_buffer           = */ !in_host,
        /* .buffer_from_host_ptr  = */ in_host,
        /* .events                = */ async,
        /* .mmap_support          = */ true,
    };
}

static ggml_backend_t ggml_backend_neuron_device_init_backend(ggml_backend_dev_t dev, const char * params) {
    auto * device = (ggml_backend_neuron_device_context *) dev->context;
    if (!device->core->open()) {
        return NULL;
    }
    auto * ctx = new ggml_backend_neuron_context{
        /* .device  = */ device,
        /* .planner = */
        { *device->core, ggml_backend_neuron_shared().kernels, device->fusion, ggml_backend_neuron_locate },
        /* .census  = */
        { *device->core, ggml_backend_neuron_shared().kernels, ggml_backend_neuron_holds },
        /* .computed = */
        false,
        /* .stream = */
        {},
    };
    return new ggml_backend{
        /* .guid    = */ ggml_backend_neuron_guid(),
        /* .iface   = */ ggml_backend_neuron_i,
        /* .device  = */ dev,
        /* .context = */ ctx,
    };

    GGML_UNUSED(params);
}

static ggml_backend_buffer_type_t ggml_backend_neuron_device_get_buffer_type(ggml_backend_dev_t dev) {
    if (ggml_backend_neuron_shared().buffers == neuron_buffers::HOST) {
        return ggml_backend_cpu_buffer_type();
    }
    return &((ggml_backend_neuron_device_context *) dev->context)->buffer_types[0].buft;
}

// Where tensors are in host memory anyway, that is the CPU's.
static ggml_backend_buffer_type_t ggml_backend_neuron_device_get_host_buffer_type(ggml_backend_dev_t dev) {
    return ggml_backend_neuron_shared().buffers == neuron_buffers::HOST ? NULL : neuron_host_buffer_type(dev);
}

static ggml_backend_buffer_t ggml_backend_neuron_device_buffer_from_host_ptr(ggml_backend_dev_t dev,
                                                                             void *             ptr,
                                                                             size_t             size,
                                                                             size_t             max_tensor_size) {
    return ggml_backend_cpu_buffer_from_ptr(ptr, size);

    GGML_UNUSED(dev);
    GGML_UNUSED(max_tensor_size);
}

// llama.cpp decides where a weight goes by asking for a made-up op on it: 512 tokens, parameters all 0, and the weight in a
// buffer of size 0. Returns the weight, or NULL when the op is not made up.
static const ggml_tensor * ggml_backend_neuron_probed_weight(const ggml_tensor * op) {
    for (const ggml_tensor * src : op->src) {
        if (src && src->buffer && ggml_backend_buffer_get_size(src->buffer) == 0) {
            return src;
        }
    }
    return nullptr;
}

// Returns whether kernels want a weight in its form: llama.cpp is to put it in a buffer of the type for that, not in the device's
// own, which it asks for first.
static bool ggml_backend_neuron_wants_form(const ggml_backend_neuron_device_context * device,
                                           const ggml_tensor *                        op,
                                           const ggml_tensor *                        weight) {
    return device->extra_bufts.size() > 1 &&
           ggml_backend_neuron_shared().kernels.has_weight(op, weight, neuron_form_of_type(weight->type));
}

// Answers for a weight. While ops are recorded, weights go where the kernels that can be built will want them.
static bool ggml_backend_neuron_takes_weight(const ggml_backend_neuron_device_context * device,
                                             const ggml_tensor *                        op,
                                             const ggml_tensor *                        weight) {
    const neuron_kernel_store & store = ggml_backend_neuron_shared().kernels;
    const int32_t               form  = neuron_form_of_buft(weight->buffer->buft);
    bool                        takes;
    if (form) {
        takes = form == neuron_form_of_type(weight->type) && ggml_backend_neuron_wants_form(device, op, weight);
    } else {
        takes = !ggml_backend_neuron_wants_form(device, op, weight) &&
                (store.has_signature(op) || (neuron_recording() && neuron_can_be_built(op)));
    }
    neuron_note_weight(op, weight, takes);
    return takes;
}

static bool ggml_backend_neuron_has_kernel(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    const neuron_kernel_store &      store   = ggml_backend_neuron_shared().kernels;
    const neuron_service             service = store.serve(op);
    const std::vector<neuron_kernel> kernels = service ? neuron_kernels_of(service) : store.serve_in_chain(op);
    return !kernels.empty() && std::none_of(kernels.begin(), kernels.end(), [device](const neuron_kernel & kernel) {
        return device->core->is_broken(kernel);
    });
}

// Returns whether a node is in some group. Where a bundle has no kernel for the node by itself, the CPU computes it when the
// graph has it among other nodes.
static bool ggml_backend_neuron_is_member(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    const neuron_group_index & groups = ggml_backend_neuron_shared().kernels.groups;
    return device->fusion.is_enabled() && !groups.empty() && groups.has_member(neuron_token_of(op)) && neuron_has_cpu();
}

// Returns whether the device computes a node. While ops are recorded, what can be built counts as built, though the CPU
// computes it: so a program asks at once for what it will ask for when the kernels are there.
static bool ggml_backend_neuron_computes(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    return ggml_backend_neuron_has_kernel(device, op) || ggml_backend_neuron_is_member(device, op) ||
           (neuron_recording() && neuron_can_be_built(op) && neuron_has_cpu());
}

// Returns whether what an op changes is in the device's memory: ggml's scheduler would give it a copy of what is not, and the
// change would be lost.
static bool ggml_backend_neuron_holds_updates(const ggml_backend_neuron_device_context * device,
                                              const ggml_tensor *                        op) {
    const uint32_t updates = neuron_updates_of(op);
    for (int i = 0; updates && i < GGML_MAX_SRC; i++) {
        const ggml_tensor * src  = op->src[i];
        const ggml_tensor * root = src && src->view_src ? src->view_src : src;
        if (!(updates >> i & 1) || !root || !root->buffer) {
            continue;
        }
        const auto * ctx = ggml_backend_neuron_buffer_context_of(src);
        if (!ctx || ctx->core != device->core.get()) {
            return false;
        }
    }
    return true;
}

static bool ggml_backend_neuron_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (neuron_is_view_op(op->op) || neuron_is_noop(op) || neuron_is_zero(op)) {
        return true;
    }
    auto &     shared  = ggml_backend_neuron_shared();
    auto *     device  = (ggml_backend_neuron_device_context *) dev->context;
    const bool in_host = shared.buffers == neuron_buffers::HOST;
    if (const ggml_tensor * weight = ggml_backend_neuron_probed_weight(op)) {
        // llama.cpp asks whether weights that stay with the CPU could be in the host buffer type
        const bool elsewhere = !in_host && ggml_backend_buft_is_host(weight->buffer->buft);
        return !elsewhere && ggml_backend_neuron_takes_weight(device, op, weight);
    }
    if (neuron_is_kept_by_host(op) || (!in_host && !ggml_backend_neuron_holds_updates(device, op))) {
        return false;
    }
    if (!ggml_backend_neuron_has_kernel(device, op) && !ggml_backend_neuron_is_member(device, op)) {
        neuron_note_missing(op);
    }
    const bool computed = ggml_backend_neuron_computes(device, op);
    if (!computed) {
        neuron_note_refused(op);
    }
    if (!op->view_src || in_host) {
        return computed;
    }
    // A node that writes into another tensor's memory can run only where this is: ggml's scheduler ends the program when
    // the backend that holds the memory refuses, and lets others write to addresses that are not theirs, or copies the
    // memory too early. So the node goes where the tensor is, and is computed by the CPU when it has no kernel.
    const ggml_tensor * home = op->view_src;
    if (home->buffer) {
        const auto * ctx = ggml_backend_neuron_buffer_context_of(home);
        return computed || (ctx && ctx->core == device->core.get() && neuron_has_cpu());
    }
    if (home->op == GGML_OP_NONE) {
        return computed;
    }
    return ggml_backend_neuron_computes(device, home) && (computed || neuron_has_cpu());
}

static bool ggml_backend_neuron_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    const bool in_host = ggml_backend_neuron_shared().buffers == neuron_buffers::HOST;
    if (in_host && ggml_backend_buft_is_host(buft)) {
        return true;
    }
    // where all other tensors are in host memory, weights in forms are on the device
    return ggml_backend_buft_is_neuron(buft) && buft->device == dev && (!in_host || neuron_form_of_buft(buft));
}

static const struct ggml_backend_device_i ggml_backend_neuron_device_i = {
    /* .get_name             = */ ggml_backend_neuron_device_get_name,
    /* .get_description      = */ ggml_backend_neuron_device_get_description,
    /* .get_memory           = */ ggml_backend_neuron_device_get_memory,
    /* .get_type             = */ ggml_backend_neuron_device_get_type,
    /* .get_props            = */ ggml_backend_neuron_device_get_props,
    /* .init_backend         = */ ggml_backend_neuron_device_init_backend,
    /* .get_buffer_type      = */ ggml_backend_neuron_device_get_buffer_type,
    /* .get_host_buffer_type = */ ggml_backend_neuron_device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ ggml_backend_neuron_device_buffer_from_host_ptr,
    /* .supports_op          = */ ggml_backend_neuron_device_supports_op,
    /* .supports_buft        = */ ggml_backend_neuron_device_supports_buft,
    /* .offload_op           = */ NULL,
    /* .event_new            = */ ggml_backend_neuron_device_event_new,
    /* .event_free           = */ ggml_backend_neuron_device_event_free,
    /* .event_synchronize    = */ ggml_backend_neuron_event_synchronize,
};

//
// registration
//

static std::vector<const neuron_kernels_table *> & ggml_backend_neuron_embedded() {
    static std::vector<const neuron_kernels_table *> tables;
    return tables;
}

void ggml_backend_neuron_register_bundle(const struct neuron_kernels_table * table) {
    ggml_backend_neuron_embedded().push_back(table);
}

#ifdef GGML_NEURON_EMBEDDED
void ggml_backend_neuron_register_embedded();  // generated: ggml-neuron.cmake
#endif

// Chooses where tensors live: what GGML_NEURON_BUFFERS says, else device memory when the kernels make up a whole
// transformer and host memory when they do not.
static neuron_buffers ggml_backend_neuron_choose_buffers(const neuron_kernel_store & kernels) {
    const char * chosen = getenv("GGML_NEURON_BUFFERS");
    if (chosen && *chosen) {
        if (strcmp(chosen, "device") == 0) {
            return neuron_buffers::DEVICE;
        }
        if (strcmp(chosen, "host") == 0) {
            return neuron_buffers::HOST;
        }
        NEURON_WARN("GGML_NEURON_BUFFERS is 'device' or 'host', not '%s'\n", chosen);
    }
    return kernels.covers_transformer() ? neuron_buffers::DEVICE : neuron_buffers::HOST;
}

static const char * ggml_backend_neuron_reg_get_name(ggml_backend_reg_t reg) {
    return "NEURON";

    GGML_UNUSED(reg);
}

static size_t ggml_backend_neuron_reg_get_device_count(ggml_backend_reg_t reg) {
    return ggml_backend_neuron_shared().devices.size();

    GGML_UNUSED(reg);
}

static ggml_backend_dev_t ggml_backend_neuron_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    auto & devices = ggml_backend_neuron_shared().devices;
    GGML_ASSERT(index < devices.size());
    return &devices[index];

    GGML_UNUSED(reg);
}

// What llama.cpp's test-fusion asks a backend for by name. Each device has a count of launches by graph kernel.
using ggml_backend_fusion_t = void *;

static ggml_backend_fusion_t ggml_backend_neuron_fusion_get(ggml_backend_dev_t dev) {
    return &((ggml_backend_neuron_device_context *) dev->context)->fusion;
}

static void ggml_backend_neuron_fusion_stats_init(ggml_backend_fusion_t fusion) {
    ((neuron_fusion *) fusion)->reset();
}

static void ggml_backend_neuron_fusion_stats_reset(ggml_backend_fusion_t fusion) {
    ((neuron_fusion *) fusion)->reset();
}

static int ggml_backend_neuron_fusion_stats_get(ggml_backend_fusion_t fusion,
                                                const char **         labels,
                                                uint64_t *            counts,
                                                int                   n) {
    return ((neuron_fusion *) fusion)->get(labels, counts, n);
}

static void ggml_backend_neuron_fusion_set_enabled(ggml_backend_fusion_t fusion, bool enabled) {
    ((neuron_fusion *) fusion)->set_enabled(enabled);
}

// What llama.cpp asks a device for by name: buffer types that it tries for a weight when the device's own refuses it.
static ggml_backend_buffer_type_t * ggml_backend_neuron_get_extra_bufts(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->extra_bufts.data();
}

static void * ggml_backend_neuron_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    const struct {
        const char * name;
        void *       function;
    } functions[] = {
        { "ggml_backend_dev_get_extra_bufts",    (void *) ggml_backend_neuron_get_extra_bufts    },
        { "ggml_backend_neuron_register_bundle", (void *) ggml_backend_neuron_register_bundle    },
        { "ggml_backend_fusion_get",             (void *) ggml_backend_neuron_fusion_get         },
        { "ggml_backend_fusion_stats_init",      (void *) ggml_backend_neuron_fusion_stats_init  },
        { "ggml_backend_fusion_stats_reset",     (void *) ggml_backend_neuron_fusion_stats_reset },
        { "ggml_backend_fusion_stats_get",       (void *) ggml_backend_neuron_fusion_stats_get   },
        { "ggml_backend_fusion_set_enabled",     (void *) ggml_backend_neuron_fusion_set_enabled },
    };

    for (const auto & entry : functions) {
        if (strcmp(name, entry.name) == 0) {
            return entry.function;
        }
    }
    return NULL;

    GGML_UNUSED(reg);
}

static const struct ggml_backend_reg_i ggml_backend_neuron_reg_i = {
    /* .get_name         = */ ggml_backend_neuron_reg_get_name,
    /* .get_device_count = */ ggml_backend_neuron_reg_get_device_count,
    /* .get_device       = */ ggml_backend_neuron_reg_get_device,
    /* .get_proc_address = */ ggml_backend_neuron_reg_get_proc_address,
};

static struct ggml_backend_reg g_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */ ggml_backend_neuron_reg_i,
    /* .context     = */ NULL,
};

// Says why there are no devices.
static void ggml_backend_neuron_no_devices(const std::string & why) {
    NEURON_WARN("no devices%s: %s\n", neuron_recording() ? ", and nothing is recorded" : "", why.c_str());
}

// Opens the kernels for what libnrt says the machine is; returns whether there is something for devices to do.
static bool ggml_backend_neuron_open_kernels(ggml_backend_neuron_reg_context & shared) {
    const neuron_nrt & nrt = *shared.nrt;
    NEURON_LOG("%s, version %llu.%llu.%llu %s, %u cores\n", nrt.path.c_str(), (unsigned long long) nrt.version.rt_major,
               (unsigned long long) nrt.version.rt_minor, (unsigned long long) nrt.version.rt_patch,
               nrt.version.rt_detail, nrt.n_cores);
    const std::string target = neuron_variable("GGML_NEURON_TARGET");
    neuron_record_target(target.empty() ? nrt.target : target);
#ifdef GGML_NEURON_EMBEDDED
    ggml_backend_neuron_register_embedded();
#endif
    shared.kernels.open(nrt, ggml_backend_neuron_embedded());
    shared.buffers = ggml_backend_neuron_choose_buffers(shared.kernels);
    NEURON_LOG("%zu kernels in %zu bundles; tensors in %s memory\n", shared.kernels.n_kernels(),
               shared.kernels.n_bundles(), shared.buffers == neuron_buffers::DEVICE ? "device" : "host");
    // A device that computes nothing is not harmless: llama.cpp turns flash attention off for it, and puts weights there.
    if (shared.kernels.n_kernels() == 0 && !neuron_recording()) {
        const bool named = !neuron_variable("GGML_NEURON_KERNEL_DIR").empty();
        ggml_backend_neuron_no_devices(
            named ? "GGML_NEURON_KERNEL_DIR has no kernels that can be used here"
                  : "no kernels: GGML_NEURON_KERNEL_DIR names where they are, and GGML_NEURON_RECORD a file to record "
                    "which ones a program asks for");
        return false;
    }
    return true;
}

// GGML_NEURON_REPACK=0 keeps all weights as ggml has them.
static bool ggml_backend_neuron_repacks() {
    return neuron_variable("GGML_NEURON_REPACK") != "0";
}

static void ggml_backend_neuron_add_buffer_type(const neuron_kernel_store &          kernels,
                                                ggml_backend_neuron_device_context & device,
                                                ggml_backend_dev_t                   dev,
                                                int32_t                              form) {
    ggml_backend_neuron_buffer_type & type = device.buffer_types[form];
    type.context                           = { &device, form, device.name };
    type.buft                              = {
        /* .iface   = */ ggml_backend_neuron_buffer_type_i,
        /* .device  = */ dev,
        /* .context = */ &type.context,
    };
    if (form) {
        type.context.name += std::string("_") + neuron_form_name(form);
    }
    if (form && ggml_backend_neuron_repacks() && kernels.has_form(form)) {
        device.extra_bufts.push_back(&type.buft);
    }
}

static void ggml_backend_neuron_add_device(ggml_backend_neuron_reg_context & shared, uint32_t core) {
    const neuron_nrt & nrt    = *shared.nrt;
    auto               device = std::make_unique<ggml_backend_neuron_device_context>(shared.kernels);
    device->name              = "NEURON" + std::to_string(core);
    device->description       = nrt.simulator        ? "NeuronCore, simulated on the CPU"
                                : nrt.target.empty() ? "AWS NeuronCore"
                                                     : "AWS NeuronCore (" + nrt.target + ")";
    device->core              = std::make_unique<neuron_core>(nrt, (int) core);
    shared.devices.push_back({
        /* .iface   = */ ggml_backend_neuron_device_i,
        /* .reg     = */ &g_reg,
        /* .context = */ device.get(),
    });
    for (int32_t form = 0; form <= NEURON_KERNELS_LAST_FORM; form++) {
        ggml_backend_neuron_add_buffer_type(shared.kernels, *device, &shared.devices.back(), form);
    }
    device->extra_bufts.push_back(NULL);
    shared.contexts.push_back(std::move(device));
}

#ifdef GGML_NEURON_GGML_VERSION
// Returns why this ggml can't have the backend; empty when it can. A version's last number, and what follows it in versions under
// development, is of changes that leave the interface as it is.
static std::string ggml_backend_neuron_other_ggml() {
    const auto minor = [](const std::string & version) {
        return version.substr(0, version.find('.', version.find('.') + 1));
    };
    const std::string loaded = ggml_version();
    if (minor(loaded) == minor(GGML_NEURON_GGML_VERSION)) {
        return "";
    }
    return "the plugin was built for ggml " GGML_NEURON_GGML_VERSION ", and ggml " + loaded +
           " loads it: build it again with the sources of that llama.cpp (-DGGML_NEURON_LLAMA_DIR=...)";
}
#endif

// Never destroyed: buffers may be freed by destructors that run later than any of ours.
static ggml_backend_neuron_reg_context & ggml_backend_neuron_shared() {
    static ggml_backend_neuron_reg_context * context = [] {
        auto *      shared = new ggml_backend_neuron_reg_context;
        std::string message;
        neuron_warn_of_unknown_variables();
#ifdef GGML_NEURON_GGML_VERSION
        message = ggml_backend_neuron_other_ggml();
        if (!message.empty()) {
            ggml_backend_neuron_no_devices(message);
            return shared;
        }
#endif
        shared->nrt = neuron_nrt_get(message);
        if (!shared->nrt) {
            // Where the library is absent and no variable is set, nobody expects devices.
            if (neuron_any_variable() || message.rfind("no libnrt: ", 0) != 0) {
                ggml_backend_neuron_no_devices(message);
            }
            return shared;
        }
        if (!ggml_backend_neuron_open_kernels(*shared)) {
            return shared;
        }
        const uint32_t n_devices = std::min(shared->nrt->n_cores, NEURON_MAX_CORES);
        if (n_devices < shared->nrt->n_cores) {
            NEURON_WARN("%u of %u NeuronCores are used: ggml's scheduler takes %u devices beside the CPU. "
                        "NEURON_RT_VISIBLE_CORES chooses others\n",
                        n_devices, shared->nrt->n_cores, NEURON_MAX_CORES);
        }
        shared->devices.reserve(n_devices);
        for (uint32_t i = 0; i < n_devices; i++) {
            ggml_backend_neuron_add_device(*shared, i);
        }
        if (shared->devices.empty()) {
            ggml_backend_neuron_no_devices(shared->nrt->path + " sees no NeuronCore");
        }
        // Runs before libnrt is closed, since it is registered later.
        atexit([] {
            const std::string nothing = neuron_nothing_computed();
            if (!nothing.empty()) {
                NEURON_WARN("%s\n", nothing.c_str());
            }
            for (auto & device : ggml_backend_neuron_shared().contexts) {
                device->core->release();
            }
        });
        return shared;
    }();
    return *context;
}

ggml_backend_reg_t ggml_backend_neuron_reg(void) {
    ggml_backend_neuron_shared();
    return &g_reg;
}

GGML_BACKEND_DL_IMPL(ggml_backend_neuron_reg)
