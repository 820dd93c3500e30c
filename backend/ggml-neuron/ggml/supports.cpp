#include "ggml/supports.h"

#include "fallback/cpu.h"
#include "ggml-impl.h"
#include "ggml/buffers.h"
#include "ggml/device_context.h"
#include "ggml/host_buffer.h"
#include "report/log.h"
#include "report/record_graphs.h"
#include "report/statistics.h"
#include "select/groups.h"
#include "select/sampler_probe.h"
#include "select/tensors.h"
#include "select/tokens.h"
#include "weights/weights.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

// llama.cpp decides where to put a weight by calling supports_op for an artificial op on it: 512 tokens, parameters all
// 0, the weight in a buffer of size 0, and the op in no graph. Returns the weight, or NULL for a real op. In the graphs
// of a context that only measures memory (--fit), weights and caches are in buffers of size 0, too.
static const ggml_tensor * neuron_probed_weight(const ggml_tensor * op) {
    if (op->flags & GGML_TENSOR_FLAG_COMPUTE) {
        return nullptr;
    }
    for (const ggml_tensor * src : op->src) {
        if (src && src->buffer && ggml_backend_buffer_get_size(src->buffer) == 0) {
            return src;
        }
    }
    return nullptr;
}

// Returns whether kernels require a weight in a layout that the device has buffers for.
static bool neuron_wants_layout(const ggml_backend_neuron_device_context * device,
                                const ggml_tensor *                        op,
                                const ggml_tensor *                        weight,
                                int32_t                                    layout) {
    return device->extra_bufts.size() > 1 && neuron_has_layout(weight->type, layout) &&
           ggml_backend_neuron_shared().kernels.has_weight(op, weight, layout);
}

// Returns whether kernels require a weight in any layout: llama.cpp should then put it in a buffer of that layout's
// type, and not in the device's own type, which it tries first.
static bool neuron_wants_any_layout(const ggml_backend_neuron_device_context * device,
                                    const ggml_tensor *                        op,
                                    const ggml_tensor *                        weight) {
    bool wants = false;
    for (int32_t layout = 1; layout <= NEURON_KERNELS_LAST_FORM; layout++) {
        wants = wants || neuron_wants_layout(device, op, weight, layout);
    }
    return wants;
}

// Returns whether the device takes an op for its recording: the CPU computes it, and the program then computes the same
// graphs as it will with the kernels.
static bool neuron_records(const ggml_tensor * op) {
    return neuron_recording() && neuron_cpu_computes(op);
}

// Returns whether the device takes a weight. While graphs are recorded, it takes all weights in ggml's form.
static bool neuron_takes_weight(const ggml_backend_neuron_device_context * device,
                                const ggml_tensor *                        op,
                                const ggml_tensor *                        weight) {
    const neuron_kernel_store & store  = ggml_backend_neuron_shared().kernels;
    const int32_t               layout = neuron_layout_of_buft(weight->buffer->buft);
    const size_t                size   = ggml_backend_buft_get_alloc_size(weight->buffer->buft, weight);
    if (size > NEURON_MAX_TENSOR) {
        NEURON_WARN("the weight %s has %zu bytes, and the runtime takes at most %zu as one: the CPU keeps it\n",
                    weight->name, size, NEURON_MAX_TENSOR);
        neuron_note_weight(op, weight, false);
        return false;
    }
    bool takes;
    if (layout) {
        takes = neuron_wants_layout(device, op, weight, layout);
    } else {
        // llama.cpp calls supports_op for attention's sinks with a SCALE op. Sinks on the CPU would end a part of the
        // graph before attention.
        const bool sinks = op->op == GGML_OP_SCALE && store.has_sinks(weight->ne[0]);
        takes =
            !neuron_wants_any_layout(device, op, weight) && (sinks || store.has_signature(op) || neuron_records(op));
    }
    neuron_note_weight(op, weight, takes);
    return takes;
}

// Returns whether devices take parts of a weight (-sm tensor). The meta backend has no other backend for an op on
// parts, and buffers for parts have no layout. Throws std::runtime_error if tensors are in host memory: before there is
// a context, llama.cpp has no other error path, and treats it as a model that can't be loaded.
static bool neuron_takes_parts(const ggml_tensor * op, const ggml_tensor * weight) {
    if (ggml_backend_neuron_shared().buffers == neuron_buffers::HOST) {
        NEURON_ERROR("NeuronCores compute with parts of a weight each (-sm tensor) in device memory only\n"
                     "tensors are in host memory here\n"
                     "set GGML_NEURON_BUFFERS=device\n");
        throw std::runtime_error("-sm tensor needs device memory: set GGML_NEURON_BUFFERS=device");
    }
    const bool takes = ggml_backend_neuron_shared().kernels.has_signature(op) || neuron_has_cpu();
    neuron_note_weight(op, weight, takes);
    return takes;
}

// Returns whether a device has usable kernels for a node, or for a group with it, or for such a group for another number
// of tokens. If a bundle has no kernel for the node alone, the CPU computes it in graphs in which it is in no group.
static bool neuron_has_kernel(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    const neuron_kernel_store & store  = ggml_backend_neuron_shared().kernels;
    const auto                  answer = store.answer(op);
    if (answer->member && device->fusion.is_enabled() && neuron_has_cpu()) {
        return true;
    }
    const std::vector<neuron_kernel> kernels = answer->group ? answer->group.kernels() : store.select_in_attention(op);
    return !kernels.empty() && std::none_of(kernels.begin(), kernels.end(), [device](const neuron_kernel & kernel) {
        return device->core->is_broken(kernel);
    });
}

// Returns whether kernels compute a node. For a node of llama.cpp's probe of a sampler, answers for the kernels' own
// numbers of candidates. For attention to more cells than any kernel's, answers for calls that attend to fewer: if
// llama.cpp reserves memory for a whole cache and the answer is no, it turns flash attention off (-fa auto).
static bool neuron_is_known(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    if (neuron_has_kernel(device, op) || (neuron_has_cpu() && ggml_backend_neuron_shared().kernels.fewer_cells(op))) {
        return true;
    }
    const int64_t             probed     = neuron_probed_candidates(op);
    const std::set<int64_t> & candidates = ggml_backend_neuron_shared().kernels.candidates();
    return probed && std::any_of(candidates.begin(), candidates.end(), [&](int64_t n) {
               const neuron_probe_node resized(op, probed, n);
               return neuron_has_kernel(device, &resized.node);
           });
}

static bool neuron_computes(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    return neuron_is_known(device, op) || neuron_records(op);
}

// Returns whether the tensors that an op changes are in the device's memory: ggml's scheduler would copy others, and
// the change would be lost.
static bool neuron_keeps_updates(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    const uint32_t updates = neuron_updates_of(op);
    for (int i = 0; updates && i < GGML_MAX_SRC; i++) {
        const ggml_tensor * src = op->src[i];
        if (!(updates >> i & 1) || !src || !neuron_buffer_of_root(src)) {
            continue;
        }
        const auto * ctx = neuron_buffer_of(src);
        if (!ctx || ctx->core != device->core.get()) {
            return false;
        }
    }
    return true;
}

// Returns whether the device takes a node without elements when tensors are in host memory: only if it may belong to a
// group. If a device had only such nodes of a graph, ggml would give it a buffer of 0 bytes, consider these nodes
// (whose address is NULL) not allocated, and end the program. The CPU takes them at no cost.
static bool neuron_takes_empty(const ggml_backend_neuron_device_context * device, const ggml_tensor * op) {
    const neuron_kernel_store & store = ggml_backend_neuron_shared().kernels;
    return device->fusion.is_enabled() && !store.groups.empty() && store.has_signature(op);
}

// Warns once of a node with ALiBi. A head's slope depends on its number and the number of heads, and both differ in a
// part.
static void neuron_warn_of_alibi(const ggml_tensor * op) {
    static std::atomic<bool> warned{ false };
    const bool               attends = op->op == GGML_OP_SOFT_MAX || op->op == GGML_OP_FLASH_ATTN_EXT;
    if (attends && ggml_get_op_params_f32(op, 1) > 0 && !warned.exchange(true)) {
        NEURON_WARN("%s has ALiBi, which llama.cpp computes wrongly with -sm tensor\n"
                    "each core computes slopes as if the model had only its heads\n"
                    "use -sm layer\n",
                    op->name);
    }
}

bool ggml_backend_neuron_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    auto &     shared  = ggml_backend_neuron_shared();
    auto *     device  = (ggml_backend_neuron_device_context *) dev->context;
    const bool in_host = shared.buffers == neuron_buffers::HOST;
    if (in_host && ggml_is_empty(op) && !op->view_src) {
        return neuron_takes_empty(device, op);
    }
    if (neuron_is_view_op(op->op) || neuron_is_noop(op) || neuron_is_zero(op)) {
        return true;
    }
    if (const ggml_tensor * weight = neuron_probed_weight(op)) {
        if (ggml_backend_buft_is_meta(weight->buffer->buft)) {
            return neuron_takes_parts(op, weight);
        }
        // llama.cpp tests whether weights that stay with the CPU may be in the host buffer type
        const bool elsewhere = !in_host && ggml_backend_buft_is_host(weight->buffer->buft);
        return !elsewhere && neuron_takes_weight(device, op, weight);
    }
    if (in_host) {
        neuron_note_writes(op);  // the CPU may also compute it
    }
    if (device->n_comms && !in_host) {
        // The call passes the whole node, but the device computes a part, whose shapes are unknown here. ggml's
        // scheduler can't give the other parts to another backend: partial results can't be copied, and parts can't
        // move.
        neuron_warn_of_alibi(op);
        return !neuron_is_kept_by_host(op) && neuron_has_cpu();
    }
    if (neuron_is_kept_by_host(op) || (!in_host && !neuron_keeps_updates(device, op))) {
        return false;
    }
    neuron_record_probe(op);
    if (neuron_log_repeats() && !neuron_is_known(device, op)) {
        NEURON_DEBUG("no kernel for %s\n", neuron_node_line(op).c_str());
    }
    const bool computed = neuron_computes(device, op);
    if (!computed) {
        neuron_note_refused(op);
    }
    if (!op->view_src || in_host) {
        return computed;
    }
    // A node that writes to another tensor's memory can run only where that memory is. If the memory's backend refuses,
    // ggml's scheduler ends the program, lets other backends write to foreign addresses, or copies the memory too
    // early. So the node goes to the tensor's device, and the CPU computes it when it has no kernel.
    const ggml_tensor * home = op->view_src;
    if (home->buffer) {
        return computed || (home->buffer->buft->device == dev && neuron_has_cpu());
    }
    if (home->op == GGML_OP_NONE) {
        return computed;
    }
    return neuron_computes(device, home) && (computed || neuron_has_cpu());
}
