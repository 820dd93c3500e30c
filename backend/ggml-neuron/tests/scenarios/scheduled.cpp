// Graphs that ggml's scheduler divides between a NeuronCore and the CPU.

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "scenario.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

// The device writes rows into a tensor that the CPU computed, and reads them: no kernel computes FILL.
static built write_to_other(ggml_context * ctx) {
    ggml_tensor * cells = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 32, 16);
    ggml_tensor * rows  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 3);
    ggml_tensor * fresh = f32(ctx, 32, 3);
    ggml_tensor * q     = f32(ctx, 32, 2);
    ggml_tensor * all   = ggml_set_rows(ctx, ggml_fill(ctx, cells, 0.25f), fresh, rows);
    return {
        ggml_mul_mat(ctx, ggml_view_2d(ctx, all, 32, 16, all->nb[1], 0), q), { rows, fresh, q }
    };
}

// A node without a kernel, in the memory of a node that the device computed.
static built write_to_device(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_scale_inplace(ctx, ggml_add(ctx, a, b), 0.375f);
    return {
        ggml_silu(ctx, t), { a, b }
    };
}

// Three nodes with kernels and three without; the last of these must be computed on the device.
static built partly(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_sigmoid(ctx, ggml_add(ctx, a, b));
    t               = ggml_sigmoid(ctx, ggml_rms_norm(ctx, t, 1e-5f));
    t               = ggml_mul(ctx, t, b);
    return {
        ggml_scale(ctx, t, 0.375f), { a, b }
    };
}

// Nine nodes without a kernel, each with a different difference from nodes that have a kernel, and one node with a
// kernel.
static built far_off(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_add(ctx, a, b);
    t               = ggml_rms_norm(ctx, t, 1e-3f);                           // a parameter
    t               = ggml_scale_inplace(ctx, t, 0.25f);                      // and the memory
    t               = ggml_sub(ctx, t, ggml_view_2d(ctx, b, 64, 1, 256, 0));  // an input
    t               = ggml_silu(ctx, ggml_reshape_2d(ctx, t, 32, 8));         // all shapes
    t               = ggml_mul(ctx, t, ggml_view_2d(ctx, b, 32, 8, 128, 0));
    t               = ggml_relu(ctx, ggml_view_2d(ctx, t, 16, 8, 128, 0));    // strides
    t               = ggml_mul_mat(ctx, ggml_reshape_2d(ctx, t, 32, 4), ggml_view_2d(ctx, a, 32, 7, 128, 0));
    t               = ggml_soft_max(ctx, t);                                  // an op without kernels
    t               = ggml_mul_mat(ctx, ggml_view_2d(ctx, a, 4, 3, 32, 0), ggml_reshape_3d(ctx, t, 4, 1, 7));
    return {
        t, { a, b }
    };
}

// Reports how the scheduler divides such a graph.
static void shared_out(bool watched) {
    share found;
    compare(run_scheduled({ neuron, cpu }, partly, &found, watched), run_scheduled({ cpu }, partly));
    fail(std::to_string(found.nodes) + " of " + std::to_string(found.of) + " nodes in " + std::to_string(found.splits) +
         " splits");
}

// Computes such a graph with the last node first in its set of tensors, which is sorted by address.
static void last_node_first() {
    const size_t      period = 16 * ggml_hash_size(2 * GGML_DEFAULT_GRAPH_SIZE);  // the period of ggml_hash
    std::vector<char> memory(period + 16 + context::size());
    char *            start  = memory.data() + (16 - (uintptr_t) memory.data() % 16) % 16;
    uintptr_t         result = 0;
    {
        const context ctx(start);
        result = (uintptr_t) partly(ctx.get()).result;
    }
    (void) run_scheduled({ neuron, cpu }, partly, nullptr, false, start + (period - result % period) % period);
}

static void scheduled() {
    for (const auto & build : { chain, cache, write_to_other, write_to_device }) {
        compare(run_scheduled({ neuron, cpu }, build), run_scheduled({ cpu }, build));
    }
}

// Inputs in a graph's memory, whose writes wait until the memory is used: written twice, partly over waiting writes,
// and read before.
static void inputs_in_parts() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_dev_buffer_type(neuron)));
    context          ctx;
    const built      b     = add(ctx.get());
    ggml_tensor *    a     = b.inputs[0];
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    for (ggml_tensor * t : b.inputs) {
        ggml_set_input(t);
    }
    ggml_set_output(b.result);
    check(ggml_gallocr_alloc_graph(allocator.get(), graph), "no memory");
    const std::vector<float> first  = numbers(256, 1);
    const std::vector<float> second = numbers(256, 2);
    const std::vector<float> row    = numbers(64, 3);
    const auto               set    = [](ggml_tensor * t, const std::vector<float> & values, size_t from, size_t n) {
        ggml_backend_tensor_set(t, values.data() + from, from * sizeof(float), n * sizeof(float));
    };
    std::vector<float> wanted = second;
    set(b.inputs[1], row, 0, row.size());
    set(a, first, 0, first.size());
    set(a, second, 0, second.size());
    for (const size_t from : { (size_t) 64, (size_t) 100 }) {
        set(a, first, from, 90);
        std::copy_n(first.begin() + (std::ptrdiff_t) from, 90, wanted.begin() + (std::ptrdiff_t) from);
    }
    compare(read(a), wanted);
    set(a, first, 200, 56);
    std::copy_n(first.begin() + 200, 56, wanted.begin() + 200);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    for (size_t i = 0; i < wanted.size(); i++) {
        wanted[i] += row[i % row.size()];
    }
    compare(read(b.result), wanted);
}

scenario_table scheduled_scenarios() {
    return {
        { "inputs-at-once",         [] { compare(run_scheduled({ neuron, cpu }, add), run(cpu, add)); } },
        { "inputs-in-parts",        inputs_in_parts                                                     },
        { "scheduled",              scheduled                                                           },
        { "shared-out",             [] { shared_out(false); }                                           },
        { "shared-out-and-watched", [] { shared_out(true); }                                            },
        { "last-node-first",        last_node_first                                                     },
        { "far-off",                [] { (void) run_scheduled({ neuron, cpu }, far_off); }              },
    };
}
