#include "ggml/backend.h"

#include "device/core.h"
#include "ggml-impl.h"
#include "ggml-neuron.h"
#include "ggml/buffers.h"
#include "ggml/chain.h"
#include "ggml/events.h"
#include "ggml/host_buffer.h"
#include "plan/compute.h"
#include "report/log.h"
#include "report/metrics.h"
#include "report/record_graphs.h"
#include "report/statistics.h"
#include "select/groups.h"
#include "select/kernel_store.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

static const char * ggml_backend_neuron_get_name(ggml_backend_t backend) {
    return ((ggml_backend_neuron_context *) backend->context)->device->name.c_str();
}

static void ggml_backend_neuron_free(ggml_backend_t backend) {
    neuron_flush_chains();
    auto *            ctx     = (ggml_backend_neuron_context *) backend->context;
    const std::string summary = ctx->statistics.summary();
    if (!summary.empty()) {
        neuron_say_again("%s: %s\n", ctx->device->name.c_str(), summary.c_str());
    }
    ggml_backend_neuron_synchronize(backend);
    neuron_record_flush();
    delete ctx;
    delete backend;
}

// Returns whether the program reads a graph's results at once. The backend waits for such a graph: the program would
// wait anyway, and a failed launch then gives the graph's own status.
static bool ggml_backend_neuron_has_output(const ggml_cgraph * cgraph) {
    return std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, [](const ggml_tensor * node) {
        return (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 && !ggml_is_empty(node);
    });
}

enum ggml_status ggml_backend_neuron_compute(ggml_backend_neuron_context & backend, ggml_cgraph * cgraph) {
    auto *        ctx  = &backend;
    neuron_core & core = *ctx->device->core;
    if (ggml_backend_neuron_shared().buffers == neuron_buffers::HOST) {
        std::for_each(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_note_writes);
    }
    std::unique_lock<std::mutex> graph_lock(core.graph_mutex);
    std::lock_guard<std::mutex>  lock(core.mutex);
    ctx->computed = true;
    ctx->stream.graph++;
    if (ctx->stream.failed != NRT_SUCCESS) {
        NEURON_ERROR(
            "%s: a launch of an earlier graph failed after ggml had that graph back: this graph is not computed\n",
            ctx->device->name.c_str());
        return neuron_ggml_status(core.finish(ctx->stream));
    }
    const NRT_STATUS written = core.write_staged();
    if (written != NRT_SUCCESS) {
        core.finish(ctx->stream);
        return neuron_ggml_status(written);
    }
    const neuron_plan * plan   = nullptr;
    enum ggml_status    status = ctx->planner.get(cgraph, &plan);
    if (status == GGML_STATUS_SUCCESS) {
        ctx->statistics.add(cgraph, *plan);
        for (int reason = 0; reason < NEURON_UNGROUPED_COUNT; reason++) {
            g_metrics.outside[reason].fetch_add(plan->outside[reason], std::memory_order_relaxed);
        }
    }
    for (size_t i = 0; status == GGML_STATUS_SUCCESS && i < plan->nodes.size(); i++) {
        status = neuron_compute(core, ctx->stream, plan->nodes[i]);
    }
    if (status != GGML_STATUS_SUCCESS) {
        core.finish(ctx->stream);
    } else if (ggml_backend_neuron_has_output(cgraph)) {
        g_metrics.traffic.end_graph();
        graph_lock.unlock();  // another backend of the core may launch meanwhile
        const NRT_STATUS finished = core.finish(ctx->stream);
        status                    = finished == NRT_SUCCESS ? status : neuron_ggml_status(finished);
    }
    return status;
}

// Reports that the program uses one of several cores by default (device_id in ggml/registration.cpp).
static void ggml_backend_neuron_report_one_core() {
    const auto & shared  = ggml_backend_neuron_shared();
    const auto   is_used = [](const auto & device) {
        return device->has_backend.load();
    };
    const ptrdiff_t n_used = std::count_if(shared.contexts.begin(), shared.contexts.end(), is_used);
    if (!shared.nrt->has_selected_cores && n_used == 1 && shared.contexts.size() > 1) {
        NEURON_WARN("1 of %zu NeuronCores is used: -dev NEURON0,NEURON1, -sm tensor, NEURON_RT_NUM_CORES or "
                    "NEURON_RT_VISIBLE_CORES use more\n",
                    shared.contexts.size());
    }
}

static enum ggml_status ggml_backend_neuron_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    static std::once_flag once;
    std::call_once(once, ggml_backend_neuron_report_one_core);
    auto *           ctx = (ggml_backend_neuron_context *) backend->context;
    enum ggml_status status;
    if (ctx->chain && ctx->chain->append(ctx, cgraph, status)) {
        return status;
    }
    neuron_record_graph(cgraph);
    return ggml_backend_neuron_compute(*ctx, cgraph);
}

// Keeps a group's sources until the whole group is computed: the allocator would free a tensor after its last reader,
// and give its memory to a result of the group.
static void ggml_backend_neuron_keep_slots(const ggml_cgraph *                         cgraph,
                                           const neuron_groups &                       groups,
                                           struct ggml_backend_graph_optimize_params * params) {
    for (const neuron_group & group : groups.groups) {
        for (const neuron_group_slot & slot : group.slots) {
            if (slot.tensor && !slot.tensor->buffer && !slot.tensor->data) {
                params->add_alloc_dep(params->user_data, slot.tensor, cgraph->nodes[group.last()]);
            }
        }
    }
}

// Loads the programs of a graph. When llama.cpp makes a context, it calls graph_optimize for the graphs that it
// reserves memory for: the longest ones, and the graphs for one token. So the first token does not wait for their
// programs.
static void ggml_backend_neuron_preload(const ggml_backend_neuron_context & ctx,
                                        const ggml_cgraph *                 cgraph,
                                        const neuron_groups &               groups) {
    const neuron_kernel_store & store = ggml_backend_neuron_shared().kernels;
    if (std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes,
                    [&](const ggml_tensor * node) { return store.fewer_cells(node) > 0; })) {
        return;  // calls attend to fewer cells, with other programs
    }
    std::vector<neuron_kernel> kernels;
    std::vector<bool>          grouped((size_t) cgraph->n_nodes, false);
    const auto                 add = [&kernels](const std::vector<neuron_kernel> & more) {
        kernels.insert(kernels.end(), more.begin(), more.end());
    };
    for (const neuron_group & group : groups.groups) {
        add(group.kernels());
        for (const int i : group.nodes) {
            grouped[(size_t) i] = true;
        }
    }
    for (int i = 0; i < cgraph->n_nodes; i++) {
        if (!grouped[(size_t) i] && neuron_is_work(cgraph->nodes[i])) {
            const auto answer = store.answer(cgraph->nodes[i]);
            add(answer->group ? answer->group.kernels() : store.select_in_attention(cgraph->nodes[i]));
        }
    }
    ctx.device->core->preload(kernels);
}

// Prevents the scheduler's allocator from giving a node a source's memory: a kernel's result must not overlap its
// inputs, and the copy that avoids this costs more than the memory.
static void ggml_backend_neuron_graph_optimize(ggml_backend_t                              backend,
                                               ggml_cgraph *                               cgraph,
                                               struct ggml_backend_graph_optimize_params * params) {
    static const neuron_groups none;
    auto *                     ctx    = (ggml_backend_neuron_context *) backend->context;
    const neuron_groups &      groups = ctx->device->fusion.is_enabled() ? ctx->planner.find_groups(cgraph) : none;
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

static constexpr struct ggml_backend_i ggml_backend_neuron_i = [] {
    struct ggml_backend_i i = {};
    i.get_name              = ggml_backend_neuron_get_name;
    i.free                  = ggml_backend_neuron_free;
    i.set_tensor_async      = ggml_backend_neuron_set_tensor_async;
    i.get_tensor_async      = ggml_backend_neuron_get_tensor_async;
    i.cpy_tensor_async      = ggml_backend_neuron_cpy_tensor_async;
    i.synchronize           = ggml_backend_neuron_synchronize;
    i.graph_compute         = ggml_backend_neuron_graph_compute;
    i.event_record          = ggml_backend_neuron_event_record;
    i.event_wait            = ggml_backend_neuron_event_wait;
    i.graph_optimize        = ggml_backend_neuron_graph_optimize;
    return i;
}();

static ggml_guid_t ggml_backend_neuron_guid(void) {
    static ggml_guid guid = { 0x6e, 0x4b, 0x91, 0x0c, 0x2d, 0xf3, 0x47, 0x58,
                              0xa6, 0x1e, 0xb9, 0x70, 0x35, 0xc8, 0xd2, 0x14 };
    return &guid;
}

bool ggml_backend_is_neuron(ggml_backend_t backend) {
    return backend != NULL && ggml_guid_matches(backend->guid, ggml_backend_neuron_guid());
}

ggml_backend_t ggml_backend_neuron_device_init_backend(ggml_backend_dev_t dev, const char * params) {
    auto * device = (ggml_backend_neuron_device_context *) dev->context;
    if (!device->core->open()) {
        return NULL;
    }
    device->has_backend = true;
    auto * ctx          = new ggml_backend_neuron_context{
        /* .device  = */ device,
        /* .planner = */
        { *device->core, ggml_backend_neuron_shared().kernels, device->fusion, neuron_locate },
        /* .statistics  = */
        { *device->core, ggml_backend_neuron_shared().kernels, neuron_is_on_core },
        /* .computed = */
        false,
    };
    auto * backend   = new ggml_backend{};
    backend->guid    = ggml_backend_neuron_guid();
    backend->iface   = ggml_backend_neuron_i;
    backend->device  = dev;
    backend->context = ctx;
    return backend;

    GGML_UNUSED(params);
}
