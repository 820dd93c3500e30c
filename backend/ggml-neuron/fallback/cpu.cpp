#include "fallback/cpu.h"

#include "fallback/cpu_rows.h"
#include "ggml-cpp.h"
#include "report/log.h"
#include "select/kernel_store.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

// A backend that is loaded at run time links to libggml-base. libggml registers the CPU backend, and a program may lack
// it.
#pragma weak ggml_backend_dev_by_type

static ggml_backend_t cpu_backend() {
    static ggml_backend_t backend = []() -> ggml_backend_t {
        if (!ggml_backend_dev_by_type) {
            return nullptr;
        }
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        return device ? ggml_backend_dev_init(device, nullptr) : nullptr;
    }();
    return backend;
}

// All cores share one CPU backend with its work memory and threads: it computes for one core at a time.
static enum ggml_status compute_alone(ggml_backend_t cpu, ggml_cgraph * graph) {
    static std::mutex                 mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    return ggml_backend_graph_compute(cpu, graph);
}

bool neuron_has_cpu() {
    return cpu_backend() != nullptr;
}

bool neuron_cpu_computes(const ggml_tensor * op) {
    return neuron_has_cpu() && ggml_backend_supports_op(cpu_backend(), op);
}

namespace {

// A host copy of device memory while the node is computed. Overlapping tensors share one.
struct mirror {
    const ggml_tensor *        owner;
    const char *               begin;
    const char *               end;
    std::vector<neuron_bytes>  used;  // bytes that the node reads
    std::unique_ptr<uint8_t[]> data;  // reserved addresses; only used bytes take memory
};

// A node and its sources, in host memory.
class host_node {
  public:
    host_node(ggml_tensor * node, const neuron_host_access & access) :
        node(node), access(access),
        rows_only(node->op == GGML_OP_SET_ROWS && access.is_device(node) && is_in_place(node)),
        gathers(node->op == GGML_OP_GET_ROWS && access.is_device(node->src[0])) {}

    // Copies device memory to the host; returns whether it succeeded.
    bool read();

    // Returns a node in `ctx` that computes the same in host memory.
    ggml_tensor * copy(ggml_context * ctx);

    // Copies the results of `result`, the copy, to the device; returns whether it succeeded.
    bool write(const ggml_tensor * result);

  private:
    // The scheduler may have copied the destination: then the result is that copy with other rows.
    static bool is_in_place(const ggml_tensor * node) { return node->src[2]->data == node->data; }

    void          add(const ggml_tensor * t, bool is_read);
    bool          read_mirrors();
    bool          write_tensor(const ggml_tensor * t, const void * data);
    void *        address_of(const ggml_tensor * t);
    ggml_tensor * host_tensor(ggml_context * ctx, const ggml_tensor * t, void * data);
    ggml_tensor * copy_rows(ggml_context * ctx);
    ggml_tensor * copy_gathered(ggml_context * ctx);

    ggml_tensor * copy_tensor(ggml_context * ctx, const ggml_tensor * t) { return host_tensor(ctx, t, address_of(t)); }

    ggml_tensor * const        node;
    const neuron_host_access & access;
    std::vector<mirror>        mirrors;
    const bool                 rows_only;  // SET_ROWS: its destination is not read, and only some rows are written
    const bool                 gathers;    // GET_ROWS: it reads only some rows of its first source
    std::vector<uint8_t>       rows;       // rows that it computes, or reads
    std::vector<int64_t>       row_numbers;
    std::vector<int32_t>       gathered_numbers;
    std::vector<ggml_backend_buffer_ptr> buffers;
};

// Adds a mirror for a tensor, and merges it with mirrors that it overlaps.
void host_node::add(const ggml_tensor * t, bool is_read) {
    if (!access.is_device(t) || ggml_is_empty(t)) {
        return;
    }
    mirror m{ t, (const char *) t->data, (const char *) t->data + ggml_nbytes(t), {}, {} };
    if (is_read) {
        m.used = neuron_bytes_of(t);
    }
    for (size_t i = 0; i < mirrors.size();) {
        if (mirrors[i].begin < m.end && m.begin < mirrors[i].end) {
            m.begin = std::min(m.begin, mirrors[i].begin);
            m.end   = std::max(m.end, mirrors[i].end);
            m.used.insert(m.used.end(), mirrors[i].used.begin(), mirrors[i].used.end());
            mirrors.erase(mirrors.begin() + (std::ptrdiff_t) i);
            i = 0;  // the merged one may overlap others
        } else {
            i++;
        }
    }
    mirrors.push_back(std::move(m));
}

bool host_node::read_mirrors() {
    return std::all_of(mirrors.begin(), mirrors.end(), [this](mirror & m) {
        m.data.reset(new uint8_t[(size_t) (m.end - m.begin)]);
        const std::vector<neuron_bytes> used = neuron_unite(m.used);
        return std::all_of(used.begin(), used.end(), [&](const neuron_bytes & b) {
            return access.read(m.owner, b.begin, m.data.get() + (b.begin - m.begin), (size_t) (b.end - b.begin));
        });
    });
}

bool host_node::read() {
    for (int i = gathers ? 1 : 0; i < (rows_only ? 2 : neuron_n_src(node)); i++) {
        if (node->src[i]) {
            add(node->src[i], true);
        }
    }
    if (!rows_only) {
        add(node, node->view_src != nullptr);  // the bytes between a view's elements are written back
    }
    return read_mirrors() && (!gathers || neuron_read_rows(node, address_of(node->src[1]), rows, access));
}

void * host_node::address_of(const ggml_tensor * t) {
    const char * address = (const char *) t->data;
    for (mirror & m : mirrors) {
        if (access.is_device(t) && m.begin <= address && address < m.end) {
            return m.data.get() + (address - m.begin);
        }
    }
    return t->data;
}

ggml_tensor * host_node::host_tensor(ggml_context * ctx, const ggml_tensor * t, void * data) {
    ggml_tensor * copy = ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
    std::copy(t->nb, t->nb + GGML_MAX_DIMS, copy->nb);
    copy->data        = data;
    // ggml requires aligned buffers; a view's data may not be aligned
    const size_t skip = (uintptr_t) copy->data % 64;
    buffers.emplace_back(ggml_backend_cpu_buffer_from_ptr((char *) copy->data - skip, skip + ggml_nbytes(t) + 1));
    copy->buffer = buffers.back().get();
    ggml_set_name(copy, t->name);
    return copy;
}

// Returns a SET_ROWS with the same rows, one after the other.
ggml_tensor * host_node::copy_rows(ggml_context * ctx) {
    const ggml_tensor * from = node->src[0];
    ggml_tensor *       to   = ggml_new_tensor_4d(ctx, node->type, node->ne[0], from->ne[1], from->ne[2], from->ne[3]);
    ggml_tensor *       ids  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, from->ne[1]);
    rows.resize(ggml_nbytes(to));
    row_numbers.resize((size_t) from->ne[1]);
    std::iota(row_numbers.begin(), row_numbers.end(), 0);

    ggml_tensor * result = host_tensor(ctx, to, rows.data());
    result->op           = node->op;
    result->flags        = node->flags | GGML_TENSOR_FLAG_COMPUTE;
    result->src[0]       = copy_tensor(ctx, from);
    result->src[1]       = host_tensor(ctx, ids, row_numbers.data());
    result->src[2]       = result;
    return result;
}

// Returns a GET_ROWS of only these rows, one after the other.
ggml_tensor * host_node::copy_gathered(ggml_context * ctx) {
    const ggml_tensor * ids = node->src[1];
    ggml_tensor *       all =
        ggml_new_tensor_4d(ctx, node->src[0]->type, node->src[0]->ne[0], ids->ne[0], ids->ne[1], ids->ne[2]);
    std::vector<int32_t> & numbers = gathered_numbers;
    numbers.resize((size_t) ggml_nelements(ids));
    for (size_t i = 0; i < numbers.size(); i++) {
        numbers[i] = (int32_t) ((int64_t) i % ids->ne[0]);
    }
    ggml_tensor * result = copy_tensor(ctx, node);
    result->op           = node->op;
    result->flags        = node->flags | GGML_TENSOR_FLAG_COMPUTE;
    result->src[0]       = host_tensor(ctx, all, rows.data());
    result->src[1] =
        host_tensor(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], ids->ne[2]), numbers.data());
    return result;
}

ggml_tensor * host_node::copy(ggml_context * ctx) {
    if (rows_only) {
        return copy_rows(ctx);
    }
    if (gathers) {
        return copy_gathered(ctx);
    }
    ggml_tensor * result = copy_tensor(ctx, node);
    result->op           = node->op;
    result->flags        = node->flags | GGML_TENSOR_FLAG_COMPUTE;
    std::copy(node->op_params, node->op_params + GGML_MAX_OP_PARAMS / sizeof(int32_t), result->op_params);
    for (int i = 0; i < neuron_n_src(node); i++) {
        const ggml_tensor * src = node->src[i];
        result->src[i]          = !src ? nullptr : src == node ? result : copy_tensor(ctx, src);
    }
    // The scheduler may have copied the destination; SET_ROWS changes only some of its rows: see keep_result_apart.
    if (node->op == GGML_OP_SET_ROWS && node->src[2]->data != node->data && ggml_are_same_layout(node->src[2], node)) {
        memcpy(result->data, result->src[2]->data, ggml_nbytes(node));
    }
    return result;
}

// Writes a tensor; the bytes between its elements keep the values that were read.
bool host_node::write_tensor(const ggml_tensor * t, const void * data) {
    const std::vector<neuron_bytes> all = neuron_bytes_of(t);
    return std::all_of(all.begin(), all.end(), [&](const neuron_bytes & b) {
        return access.write(t, b.begin, (const char *) data + (b.begin - (const char *) t->data),
                            (size_t) (b.end - b.begin));
    });
}

bool host_node::write(const ggml_tensor * result) {
    if (rows_only) {
        return neuron_write_rows(node, address_of(node->src[1]), result->data, access);
    }
    if (access.is_device(node) && !write_tensor(node, result->data)) {
        return false;
    }
    for (int i = 0; i < neuron_n_src(node); i++) {
        const ggml_tensor * src = node->src[i];
        if ((neuron_updates_of(node) >> i & 1) && access.is_device(src) && !write_tensor(src, address_of(src))) {
            return false;
        }
    }
    return true;
}

}  // namespace

enum ggml_status neuron_compute_on_cpu(ggml_tensor * node, const neuron_host_access & access) {
    ggml_backend_t cpu = cpu_backend();
    if (!cpu) {
        NEURON_ERROR("no kernel for %s, and the program has no CPU backend to compute it\n", ggml_op_desc(node));
        return GGML_STATUS_FAILED;
    }
    host_node host(node, access);
    if (!host.read()) {
        return GGML_STATUS_FAILED;
    }
    struct ggml_init_params params = {
        /*.mem_size   =*/ggml_tensor_overhead() * (GGML_MAX_SRC + 4) + ggml_graph_overhead_custom(8, false),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };
    ggml_context_ptr ctx(ggml_init(params));
    if (!ctx) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    ggml_tensor * result = host.copy(ctx.get());
    if (!ggml_backend_supports_op(cpu, result)) {
        NEURON_ERROR("no kernel for %s, and the CPU can't compute it either\n", ggml_op_desc(node));
        return GGML_STATUS_FAILED;
    }
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_graph_add_node(graph, result);
    const enum ggml_status status = compute_alone(cpu, graph);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    return host.write(result) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}
