#include "ggml/buffers.h"

#include "fallback/cpu_rows.h"
#include "ggml-impl.h"
#include "ggml/chain.h"
#include "ggml/device_context.h"
#include "ggml/host_buffer.h"
#include "report/log.h"
#include "report/metrics.h"
#include "select/key_nodes.h"
#include "select/tensors.h"
#include "weights/repacked.h"
#include "weights/weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

//
// buffer type
//

static ggml_backend_buffer_t ggml_backend_neuron_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);

static size_t ggml_backend_neuron_buffer_type_get_alignment(ggml_backend_buffer_type_t buft) {
    return NEURON_ALIGNMENT;

    GGML_UNUSED(buft);
}

// ggml splits larger buffers.
static size_t ggml_backend_neuron_buffer_type_get_max_size(ggml_backend_buffer_type_t buft) {
    return NEURON_MAX_TENSOR;

    GGML_UNUSED(buft);
}

size_t neuron_tail_of(const ggml_tensor * t) {
    if (t->op != GGML_OP_NONE || t->view_src || (t->flags & GGML_TENSOR_FLAG_INPUT) || !ggml_is_contiguous(t)) {
        return 0;
    }
    // Attention reads one sequence's cache. If each sequence has its own, SET_ROWS writes all of them as one tensor.
    int64_t more = 0;
    for (const int64_t own : { t->ne[NEURON_SET_ROWS_AXIS], ggml_nrows(t) }) {
        const int64_t rows = ggml_backend_neuron_shared().kernels.rows_written(t, own);
        if (rows > own && rows <= 2 * own) {
            more = std::max(more, rows - own);
        }
    }
    return more && !neuron_is_offered_weight(t) ? (size_t) more * t->nb[NEURON_SET_ROWS_AXIS] : 0;
}

static size_t ggml_backend_neuron_buffer_type_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    return neuron_alloc_size(buft, t) + neuron_tail_of(t);
}

constexpr struct ggml_backend_buffer_type_i ggml_backend_neuron_buffer_type_i = [] {
    struct ggml_backend_buffer_type_i i = {};
    i.get_name                          = neuron_buffer_type_get_name;
    i.alloc_buffer                      = ggml_backend_neuron_buffer_type_alloc_buffer;
    i.get_alignment                     = ggml_backend_neuron_buffer_type_get_alignment;
    i.get_max_size                      = ggml_backend_neuron_buffer_type_get_max_size;
    i.get_alloc_size                    = ggml_backend_neuron_buffer_type_get_alloc_size;
    return i;
}();

bool ggml_backend_buft_is_neuron(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == neuron_buffer_type_get_name;
}

//
// buffer
//

neuron_buffer::~neuron_buffer() {
    if (memory) {
        core->free(memory);
    }
    if (base) {
        munmap(base, reserved);
    }
}

static void ggml_backend_neuron_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    neuron_flush_chains();
    auto * ctx = (neuron_buffer *) buffer->context;
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && !ctx->used) {
        NEURON_LOG("%s: no graph used %.1f MiB of weights; a model that is loaded with --model-draft drafts only with "
                   "--spec-type draft-simple\n",
                   ggml_backend_buft_name(buffer->buft), (double) buffer->size / (1 << 20));
    }
    delete ctx;
}

static void * ggml_backend_neuron_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((neuron_buffer *) buffer->context)->base;
}

void neuron_require(const std::string & failure, const char * doing, const ggml_tensor * tensor) {
    if (!failure.empty()) {
        const std::string what = tensor ? std::string(doing) + " tensor '" + tensor->name + "'" : doing;
        GGML_ABORT("ggml-neuron: %s: %s", what.c_str(), failure.c_str());
    }
}

std::string neuron_read_packed(neuron_buffer &                                            buffer,
                               const neuron_packed_bytes &                                p,
                               uint8_t *                                                  data,
                               const std::function<std::string(void *, size_t, size_t)> & read) {
    if (!p.layout.is_permutation()) {
        return buffer.originals.read(p.begin + p.first, data, p.last - p.first);
    }
    std::vector<uint8_t> packed;
    std::vector<uint8_t> plain;
    return p.for_each_chunk([&](size_t at, size_t size) {
        packed.resize(size);
        plain.resize(size);
        const std::string failure = read(packed.data(), p.begin + at, size);
        if (failure.empty()) {
            p.layout.unpack(packed.data(), plain.data(), size / p.layout.unit());
            const size_t from = std::max(at, p.first);
            const size_t to   = std::min(at + size, p.last);
            memcpy(data + (from - p.first), plain.data() + (from - at), to - from);
        }
        return failure;
    });
}

namespace {

// Memory for data that threads write. It is not zeroed, because zeroing uses a single thread.
class neuron_room {
  public:
    uint8_t * get(size_t n) {
        if (n > size) {
            bytes.reset(new uint8_t[n]);
            size = n;
        }
        return bytes.get();
    }

  private:
    std::unique_ptr<uint8_t[]> bytes;
    size_t                     size = 0;
};

}  // namespace

// Keeps bytes of a tensor, or the whole tensor, whose layout is not a permutation. Returns "" on success, and sets the
// original's address. Needs the buffer's `packing`.
static std::string neuron_keep_original(neuron_buffer &             ctx,
                                        const neuron_packed_bytes & p,
                                        const uint8_t *             data,
                                        bool                        whole,
                                        const uint8_t *&            original) {
    const size_t n = p.last - p.first;
    original       = data;
    if (whole && ctx.originals.keep_pages(p.begin, data, n)) {
        return "";
    }
    original = ctx.originals.copy_of(p.begin);
    return ctx.originals.write(p.begin + p.first, data, n);
}

// Keeps the bytes, and writes their units.
static std::string neuron_write_converted(neuron_buffer &             ctx,
                                          const neuron_packed_bytes & p,
                                          const uint8_t *             data,
                                          bool                        whole) {
    const uint8_t *   original = nullptr;
    const std::string failure  = neuron_keep_original(ctx, p, data, whole, original);
    if (!failure.empty()) {
        return failure;
    }
    neuron_room room;
    return p.for_each_chunk([&](size_t at, size_t size) {
        const size_t n_units     = size / p.layout.unit();
        const size_t stored_size = n_units * p.layout.stored_unit();
        uint8_t *    stored      = room.get(stored_size);
        p.layout.pack(original + at, stored, n_units);
        return ctx.memory->write(stored, p.stored_at(at), stored_size);
    });
}

// Writes bytes of a tensor in a layout, or the whole tensor. Returns "" on success. Needs the buffer's `packing`.
static std::string neuron_write_packed(neuron_buffer &             ctx,
                                       const neuron_packed_bytes & p,
                                       const uint8_t *             data,
                                       bool                        whole = false) {
    if (!p.layout.is_permutation()) {
        return neuron_write_converted(ctx, p, data, whole);
    }
    neuron_room          room;
    std::vector<uint8_t> plain;
    return p.for_each_chunk([&](size_t at, size_t size) {
        uint8_t *       packed  = room.get(size);
        const size_t    n_units = size / p.layout.unit();
        const size_t    from    = std::max(at, p.first);
        const size_t    to      = std::min(at + size, p.last);
        const uint8_t * given   = data + (from - p.first);
        if (to - from < size) {  // the rest stays unchanged
            plain.resize(size);
            const std::string failure = ctx.memory->read(packed, p.begin + at, size);
            if (!failure.empty()) {
                return failure;
            }
            p.layout.unpack(packed, plain.data(), n_units);
            memcpy(plain.data() + (from - at), given, to - from);
            given = plain.data();
        }
        p.layout.pack(given, packed, n_units);
        return ctx.memory->write(packed, p.begin + at, size);
    });
}

// Zeroes the bytes behind a cache: masked values must be finite, because a NaN would not become 0.
static enum ggml_status ggml_backend_neuron_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    auto *       ctx  = (neuron_buffer *) buffer->context;
    const size_t tail = neuron_tail_of(tensor);
    if (tail) {
        neuron_require(ctx->memory->set(0, ctx->offset_of(tensor) + ggml_nbytes(tensor), tail), "setting", tensor);
    }
    return GGML_STATUS_SUCCESS;
}

static void ggml_backend_neuron_buffer_memset_tensor(ggml_backend_buffer_t buffer,
                                                     ggml_tensor *         tensor,
                                                     uint8_t               value,
                                                     size_t                offset,
                                                     size_t                size) {
    neuron_flush_chains();
    auto *                    ctx = (neuron_buffer *) buffer->context;
    const neuron_packed_bytes packed(ctx->base, tensor, (const char *) tensor->data + offset, size);
    if (packed.layout) {
        const std::vector<uint8_t>        data(size, value);
        const std::lock_guard<std::mutex> lock(ctx->packing);
        neuron_require(neuron_write_packed(*ctx, packed, data.data()), "setting", tensor);
        return;
    }
    neuron_require(ctx->memory->set(value, ctx->offset_of(tensor) + offset, size), "setting", tensor);
}

static bool neuron_is_whole(const ggml_tensor * tensor, size_t offset, size_t size) {
    return !tensor->view_src && offset == 0 && size == ggml_nbytes(tensor);
}

// Writes a tensor from a file, and keeps the original. Returns "", or why that fails: the written bytes are unusable
// then. Needs the buffer's `packing`.
static std::string neuron_write_repacked(neuron_buffer &                ctx,
                                         const neuron_packed_bytes &    p,
                                         const neuron_repacked_weight & weight,
                                         const uint8_t *                data) {
    neuron_room  room;
    const size_t chunk = std::max(PACK_CHUNK, neuron_repack_threads() * PACK_CHUNK_PER_THREAD);
    uint64_t     sum   = 0;
    for (size_t at = 0; at < weight.size; at += chunk) {
        const size_t n      = std::min(chunk, weight.size - at);
        uint8_t *    stored = room.get(n);
        if (!weight.read(at, stored, n, sum)) {
            return weight.file->path + " was changed while the program has it open";
        }
        const std::string failure = ctx.memory->write(stored, p.begin + at, n);
        if (!failure.empty()) {
            return failure;
        }
    }
    if (neuron_digest_of(sum, weight.size) != weight.stored()) {
        return weight.file->path + " is damaged there, between bytes " + std::to_string(weight.offset) + " and " +
               std::to_string(weight.offset + weight.size);
    }
    const uint8_t * original = nullptr;
    return p.layout.is_permutation() ? "" : neuron_keep_original(ctx, p, data, true, original);
}

// Writes a whole tensor from a file of GGML_NEURON_REPACKED, if one has it. Needs the buffer's `packing`.
static bool neuron_takes_repacked(neuron_buffer &             ctx,
                                  const ggml_tensor *         tensor,
                                  const neuron_packed_bytes & p,
                                  const uint8_t *             data) {
    if (neuron_repacked_files().empty()) {
        return false;
    }
    std::string                    why;
    const neuron_repacked_weight * weight = neuron_find_repacked(tensor, data, why);
    if (weight) {
        why = neuron_write_repacked(ctx, p, *weight, data);
    }
    if (!why.empty() && ctx.repacked.first_not_read.empty()) {
        ctx.repacked.first_not_read = std::string(tensor->name) + ": " + why;
    }
    return why.empty();
}

// Reports the time to repack a buffer's weights, and the files of GGML_NEURON_REPACKED that were unusable.
static void neuron_say_repacked(neuron_buffer & ctx, const char * name) {
    constexpr double  MIB   = 1 << 20;
    const auto &      all   = ctx.repacked;
    const auto        files = (double) ctx.originals.in_files();
    const auto        bytes = (double) all.bytes;
    const std::string read  = std::to_string(all.n_read) + " weights were repacked before; ";
    NEURON_LOG("%s: %zu weights, %.1f MiB, repacked in %.1f s by at most %zu threads; %soriginals: %.1f MiB in the "
               "model's file, %.1f MiB in host memory\n",
               name, all.n, bytes / MIB, all.seconds, neuron_repack_threads(), all.n_read ? read.c_str() : "",
               files / MIB, ctx.originals ? (bytes - files) / MIB : 0.0);
    if (!all.first_not_read.empty()) {
        NEURON_WARN("%s: %zu of %zu weights are not read from files of GGML_NEURON_REPACKED, but repacked now\n"
                    "the first is %s\n"
                    "to write a file for this model and its kernels: kernelgen repack MODEL.gguf KERNELS\n",
                    name, all.n - all.n_read, all.n, all.first_not_read.c_str());
    }
}

// Sets bytes of a tensor in a layout. When the buffer is full, reports the time this took; llama.cpp shows the progress
// until then.
static void neuron_set_packed(ggml_backend_buffer_t       buffer,
                              const ggml_tensor *         tensor,
                              const neuron_packed_bytes & packed,
                              const uint8_t *             data) {
    neuron_buffer &                   ctx = *(neuron_buffer *) buffer->context;
    const std::lock_guard<std::mutex> lock(ctx.packing);
    const auto                        begin = std::chrono::steady_clock::now();
    const bool                        whole = neuron_is_whole(tensor, packed.first, packed.last - packed.first);
    const bool                        read  = whole && neuron_takes_repacked(ctx, tensor, packed, data);
    if (!read) {
        neuron_require(neuron_write_packed(ctx, packed, data, whole), "writing", tensor);
    }
    if (!whole) {
        return;
    }
    auto & all = ctx.repacked;
    all.n++;
    all.n_read += read;
    all.bytes += packed.last;
    all.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const size_t taken = GGML_PAD(neuron_alloc_size(buffer->buft, tensor), NEURON_ALIGNMENT);
    if (all.taken < buffer->size && all.taken + taken >= buffer->size) {
        neuron_say_repacked(ctx, ggml_backend_buft_name(buffer->buft));
    }
    all.taken += taken;
}

// ggml's allocators align each tensor, so the bytes between a whole tensor and the next boundary belong to no other
// tensor.
std::string neuron_write_input(const ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const neuron_buffer & ctx   = *neuron_buffer_of(tensor);
    const bool            whole = neuron_is_whole(tensor, offset, size);
    const size_t          begin = ctx.offset_of(tensor) + offset;
    const size_t          room  = whole && begin % NEURON_ALIGNMENT == 0 ? GGML_PAD(size, NEURON_ALIGNMENT) : size;
    return ctx.memory->stage(data, begin, size, room);
}

static void ggml_backend_neuron_buffer_set_tensor(ggml_backend_buffer_t buffer,
                                                  ggml_tensor *         tensor,
                                                  const void *          data,
                                                  size_t                offset,
                                                  size_t                size) {
    neuron_flush_chains();
    auto *                    ctx = (neuron_buffer *) buffer->context;
    const neuron_packed_bytes packed(ctx->base, tensor, (const char *) tensor->data + offset, size);
    if (packed.layout) {
        neuron_set_packed(buffer, tensor, packed, (const uint8_t *) data);
        return;
    }
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        neuron_require(neuron_write_input(tensor, data, offset, size), "writing", tensor);
        return;
    }
    neuron_require(ctx->memory->write(data, ctx->offset_of(tensor) + offset, size), "writing", tensor);
}

// Reads the part of a tensor in ggml's layout that is in some bytes. For a whole view it reads the elements and small
// gaps between them: the elements of a transposed cache may be far apart. Counts the bytes, except for weights, which
// have their own counter, and for outputs, which the program reads.
static std::string neuron_read_plain(neuron_buffer &     ctx,
                                     const ggml_tensor * t,
                                     char *              data,
                                     size_t              offset,
                                     size_t              size) {
    std::vector<neuron_bytes> parts = {
        { (const char *) t->data + offset, (const char *) t->data + offset + size }
    };
    if (t->view_src && size == ggml_nbytes(t) && !ggml_is_contiguous(t)) {
        parts = neuron_bytes_of(t);
    }
    uint64_t moved = 0;
    for (const neuron_bytes & part : parts) {
        const std::string failure =
            ctx.memory->read(data + (part.begin - (const char *) t->data) - offset, (size_t) (part.begin - ctx.base),
                             (size_t) (part.end - part.begin));
        if (!failure.empty()) {
            return failure;
        }
        moved += (uint64_t) (part.end - part.begin);
    }
    if (!neuron_is_weight(t) && !(t->flags & GGML_TENSOR_FLAG_OUTPUT)) {
        g_metrics.fallback.add_read(t, moved);
    }
    return "";
}

static void ggml_backend_neuron_buffer_get_tensor(ggml_backend_buffer_t buffer,
                                                  const ggml_tensor *   tensor,
                                                  void *                data,
                                                  size_t                offset,
                                                  size_t                size) {
    neuron_flush_chains();
    auto *     ctx     = (neuron_buffer *) buffer->context;
    const auto address = (const char *) tensor->data + offset;
    uint64_t   version;
    {
        const std::lock_guard<std::mutex> lock(ctx->core->mutex);
        version = ctx->memory->version;
    }
    const auto from_device = [&]() -> std::string {
        const neuron_packed_bytes packed(ctx->base, tensor, address, size);
        const auto                read = [ctx](void * to, size_t at, size_t n) {
            return ctx->memory->read(to, at, n);
        };
        return packed.layout ? neuron_read_packed(*ctx, packed, (uint8_t *) data, read)
                             : neuron_read_plain(*ctx, tensor, (char *) data, offset, size);
    };
    neuron_require(neuron_read_or_recall(*ctx, version, tensor, address, data, size, from_device), "reading", tensor);
}

std::string neuron_read_or_recall(neuron_buffer &                      buffer,
                                  uint64_t                             version,
                                  const ggml_tensor *                  owner,
                                  const void *                         address,
                                  void *                               data,
                                  size_t                               size,
                                  const std::function<std::string()> & read) {
    buffer.used              = true;
    const ggml_tensor * root = neuron_root_of(owner);
    if (!neuron_is_weight(owner) || address != root->data || size != ggml_nbytes(root)) {
        return read();
    }
    const auto offset = (size_t) ((const char *) address - buffer.base);
    if (buffer.copies.get(offset, size, version, data)) {
        return "";
    }
    const std::string failure = read();
    if (failure.empty()) {
        g_metrics.fallback.add_weight(owner, size);
        buffer.copies.note(offset, size, version, data);
    }
    return failure;
}

neuron_buffer * neuron_buffer_of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(tensor);
    if (!buffer || !ggml_backend_buft_is_neuron(buffer->buft)) {
        return nullptr;
    }
    return (neuron_buffer *) buffer->context;  // NULL for the dummy buffers of size 0
}

bool ggml_backend_neuron_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    neuron_flush_chains();
    auto * to   = (neuron_buffer *) buffer->context;
    auto * from = neuron_buffer_of(src);
    if (!from || from->core != to->core) {
        return false;  // the runtime copies only between tensors of one core
    }
    if (neuron_layout(src) || neuron_layout(dst)) {
        return false;  // ggml reads one tensor and writes the other, both in ggml's order
    }
    std::lock_guard<std::mutex> lock(to->core->mutex);
    const size_t                size = ggml_nbytes(src);
    return to->core->copy({ from->memory, from->offset_of(src), size }, { to->memory, to->offset_of(dst), size }) ==
           NRT_SUCCESS;
}

static void ggml_backend_neuron_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    neuron_flush_chains();
    auto * ctx = (neuron_buffer *) buffer->context;
    if (ctx->originals) {
        // The buffer has no list of its tensors. Blocks of zeros are zeros in each layout; other bytes give unknown
        // elements.
        neuron_require(value ? "in this layout it can be cleared with 0 alone" : "", "clearing a buffer", nullptr);
        ctx->originals.clear();
    }
    neuron_require(ctx->memory->set(value, 0, ctx->memory->size), "clearing a buffer", nullptr);
}

static constexpr struct ggml_backend_buffer_i ggml_backend_neuron_buffer_i = [] {
    struct ggml_backend_buffer_i i = {};
    i.free_buffer                  = ggml_backend_neuron_buffer_free_buffer;
    i.get_base                     = ggml_backend_neuron_buffer_get_base;
    i.init_tensor                  = ggml_backend_neuron_buffer_init_tensor;
    i.memset_tensor                = ggml_backend_neuron_buffer_memset_tensor;
    i.set_tensor                   = ggml_backend_neuron_buffer_set_tensor;
    i.get_tensor                   = ggml_backend_neuron_buffer_get_tensor;
    i.cpy_tensor                   = ggml_backend_neuron_buffer_cpy_tensor;
    i.clear                        = ggml_backend_neuron_buffer_clear;
    return i;
}();

// Returns addresses that no other memory has, or NULL.
static char * neuron_reserve(size_t size) {
    void * begin = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? nullptr : (char *) begin;
}

static ggml_backend_buffer_t ggml_backend_neuron_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft,
                                                                          size_t                     size) {
    auto * device = ((neuron_buffer_type_context *) buft->context)->device;
    if (size > NEURON_MAX_TENSOR) {
        NEURON_ERROR("%s: no buffer of %zu bytes: the runtime takes at most %zu as one, and no tensor may be larger\n",
                     device->name.c_str(), size, NEURON_MAX_TENSOR);
        return NULL;
    }
    auto ctx                   = std::make_unique<neuron_buffer>();
    ctx->core                  = device->core.get();
    ctx->reserved              = std::max<size_t>(size, 1);
    ctx->base                  = neuron_reserve(ctx->reserved);
    const bool keeps_originals = !neuron_is_permutation(neuron_layout_of_buft(buft));
    if (!ctx->base || (keeps_originals && !ctx->originals.reserve(ctx->reserved))) {
        NEURON_ERROR("%s: no address range of %zu bytes\n", device->name.c_str(), size);
        return NULL;
    }
    ctx->memory = ctx->core->allocate(ctx->reserved);
    if (!ctx->memory) {
        NEURON_ERROR("%s: no buffer of %.2f MiB in device memory\n", device->name.c_str(), size / 1024.0 / 1024.0);
        return NULL;
    }
    return ggml_backend_buffer_init(buft, ggml_backend_neuron_buffer_i, ctx.release(), size);
}

bool neuron_locate(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand) {
    operand.size = ggml_nbytes(t);
    if (auto * ctx = neuron_buffer_of(t)) {
        const neuron_packed_bytes stored(ctx->base, t, t->data, operand.size);
        ctx->used      = true;
        operand.memory = ctx->memory;
        operand.offset = ctx->offset_of(t);
        if (stored.layout && !stored.layout.is_permutation()) {
            operand.offset = stored.stored_at(stored.first);
            operand.size   = stored.stored_at(stored.last) - operand.offset;
        }
        return ctx->core == &core && operand.offset + operand.size <= ctx->memory->size;
    }
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(t);
    if (!t->data || (buffer && !ggml_backend_buffer_is_host(buffer))) {
        return false;
    }
    ggml_backend_neuron_reg_context & shared = ggml_backend_neuron_shared();
    // the same core, not constant, so that it can allocate
    neuron_core &                     same   = *shared.contexts[(size_t) core.vnc]->core;
    neuron_locate_kept(same, t, shared.kernels.programs(), operand);
    return true;
}

bool neuron_is_on_core(const neuron_core & core, const ggml_tensor * t) {
    const auto * ctx = neuron_buffer_of(t);
    return ggml_backend_neuron_shared().buffers == neuron_buffers::HOST || (ctx && ctx->core == &core);
}
