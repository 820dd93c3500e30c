// Graphs on one NeuronCore: consecutive kernels, in-place nodes, views, and nodes that compute nothing.

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "placed.h"
#include "scenario.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

ggml_tensor * f32(ggml_context * ctx, int64_t ne0, int64_t ne1) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1);
}

built add(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64);
    return {
        ggml_add(ctx, a, b), { a, b }
    };
}

built chain(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_add(ctx, a, b);
    t               = ggml_rms_norm(ctx, t, 1e-5f);
    t               = ggml_mul(ctx, t, b);
    t               = ggml_silu(ctx, t);
    t               = ggml_scale(ctx, t, 0.5f);
    return {
        ggml_sub(ctx, a, t), { a, b }
    };
}

static built views(ggml_context * ctx) {
    ggml_tensor * a        = f32(ctx, 32, 12);
    ggml_tensor * b        = f32(ctx, 32, 5);
    ggml_tensor * part     = ggml_view_2d(ctx, a, 32, 6, 2 * a->nb[1], 3 * a->nb[1]);
    ggml_tensor * product  = ggml_mul_mat(ctx, part, b);  // [6, 5]
    ggml_tensor * swapped  = ggml_transpose(ctx, product);
    ggml_tensor * dense    = ggml_cont(ctx, swapped);
    ggml_tensor * reshaped = ggml_reshape_2d(ctx, dense, 10, 3);
    return {
        ggml_relu(ctx, reshaped), { a, b }
    };
}

built cache(ggml_context * ctx) {
    ggml_tensor * cells = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 32, 16);
    ggml_tensor * rows  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 3);
    ggml_tensor * fresh = f32(ctx, 32, 3);
    ggml_tensor * q     = f32(ctx, 32, 2);
    ggml_tensor * all   = ggml_set_rows(ctx, cells, fresh, rows);
    return {
        ggml_mul_mat(ctx, all, q), { cells, rows, fresh, q }
    };
}

// An in-place node whose destination was copied. ggml's scheduler does this when another backend computed the
// destination.
static void copied_destination() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    cells  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *    copy   = ggml_dup_tensor(ctx.get(), cells);
    ggml_tensor *    rows   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 3);
    ggml_tensor *    fresh  = f32(ctx.get(), 32, 3);
    ggml_tensor *    result = ggml_set_rows(ctx.get(), cells, fresh, rows);
    result->src[2]          = copy;
    ggml_cgraph * graph     = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(cells, 1);
    fill(copy, 1);
    fill(rows, 0);
    fill(fresh, 2);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    std::vector<float>       wanted = numbers(32 * 16, 1);
    const std::vector<float> values = numbers(32 * 3, 2);
    compare(read(copy), wanted);
    put_rows(wanted, 32, values);
    compare(read(cells), wanted);
}

// Frees memory that a plan copies from and to which no kernel is bound. The plan must not be used again.
static void freed_copy() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    context          other;  // its memory is freed and allocated again
    ggml_tensor *    cells  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *    copy   = ggml_new_tensor_2d(other.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *    rows   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 3);
    ggml_tensor *    fresh  = f32(ctx.get(), 32, 3);
    ggml_tensor *    result = ggml_set_rows(ctx.get(), cells, fresh, rows);
    result->src[2]          = copy;
    ggml_cgraph * graph     = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    graph->uid = 9;
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(rows, 0);
    fill(fresh, 2);
    const std::vector<float> values = numbers(32 * 3, 2);
    for (int round = 0; round < 3; round++) {
        // takes the memory that the last round freed
        ggml_backend_buffer_ptr taken(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 1 << 16));
        ggml_backend_buffer_clear(taken.get(), 0);
        copy->data                   = nullptr;
        copy->buffer                 = nullptr;
        ggml_backend_buffer_ptr gone = allocate(other, backend);
        fill(copy, (float) round);
        check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
        std::vector<float> wanted = numbers(32 * 16, (float) round);
        put_rows(wanted, 32, values);
        compare(read(cells), wanted);
    }
}

static built copies(ggml_context * ctx) {
    ggml_tensor * to   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 32, 8);
    ggml_tensor * from = f32(ctx, 32, 3);
    ggml_tensor * part = ggml_view_2d(ctx, to, 32, 3, to->nb[1], 2 * to->nb[1]);
    return {
        ggml_cpy(ctx, from, part), { to, from }
    };
}

static built inplace(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_add_inplace(ctx, a, b);
    return {
        ggml_scale_inplace(ctx, t, 2.0f), { a, b }
    };
}

static built inplace_twice(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    return { ggml_add_inplace(ctx, a, a), { a } };
}

static built same_twice(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    return { ggml_mul(ctx, a, a), { a } };
}

// AdamW changes the momenta besides the weights; the sum depends on all three.
static built optimizer(ggml_context * ctx) {
    ggml_tensor * w      = f32(ctx, 64, 4);
    ggml_tensor * grad   = f32(ctx, 64, 4);
    ggml_tensor * m      = f32(ctx, 64, 4);
    ggml_tensor * v      = f32(ctx, 64, 4);
    ggml_tensor * params = f32(ctx, 7);
    ggml_set_param(w);
    ggml_tensor * step = ggml_opt_step_adamw(ctx, w, grad, m, ggml_sqr(ctx, v), params);
    return {
        ggml_add(ctx, ggml_add(ctx, step, m), step->src[3]), { w, grad, m, v, params }
    };
}

built unused_kernel(ggml_context * ctx, ggml_tensor * kernel) {
    ggml_tensor * image = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 8, 6, 2, 1);
    return { ggml_im2col(ctx, kernel, image, 1, 1, 1, 1, 1, 1, true, GGML_TYPE_F32), { image } };
}

built unused(ggml_context * ctx) {
    return unused_kernel(ctx, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 3, 3, 2, 1));
}

// A NaN passes through kernels as through ggml's ops. Later results are correct, though a core continues to report the
// NaN.
static void not_a_number() {
    ggml_backend_ptr   backend(ggml_backend_dev_init(neuron, nullptr));
    placed             graph(backend, add);
    std::vector<float> values = numbers(256, 1);
    for (const bool bad : { false, true, false }) {
        values[7] = bad ? NAN : 1.0f;
        ggml_backend_tensor_set(graph.b.inputs[0], values.data(), 0, values.size() * sizeof(float));
        graph.compute_at_once();
        std::vector<float> got = read(graph.b.result);
        check(std::isnan(got[7]) == bad, "element 7 is " + std::to_string(got[7]));
        got[7] = values[7] = 1.0f;
        compare(got, values);
    }
}

// Different graphs under the same number, and memory that is freed and allocated again.
static void reuse() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    for (int round = 0; round < 3; round++) {
        placed graph(backend, add);
        for (const uint64_t uid : { 7, 7, 0, 0, 8 }) {
            graph.graph->uid = uid;
            fill(graph.b.inputs[0], (float) round + 1);
            fill(graph.b.inputs[1], (float) round + 2);
            ggml_backend_buffer_clear(graph.buffer.get(), 0);
            fill(graph.b.inputs[0], (float) round + 3);
            fill(graph.b.inputs[1], (float) round + 4);
            graph.compute_at_once();
            std::vector<float>       wanted = numbers(256, (float) round + 3);
            const std::vector<float> more   = numbers(64, (float) round + 4);
            for (size_t i = 0; i < wanted.size(); i++) {
                wanted[i] += more[i % 64];
            }
            compare(read(graph.b.result), wanted);
        }
    }
}

// Nodes without the compute flag are skipped.
static void skip() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, add);
    fill(graph.b.inputs[0], 1);
    graph.b.result->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    graph.compute_at_once();
    compare(read(graph.b.result), std::vector<float>(256, 0.0f));
    graph.b.result->flags |= GGML_TENSOR_FLAG_COMPUTE;
    graph.compute_at_once();
    compare(read(graph.b.result), numbers(256, 1));
}

// Nodes without elements, writes of no rows, sums over nothing, and a concatenation with no rows.
static void empty() {
    context       ctx;
    ggml_tensor * nothing = ggml_add(ctx.get(), f32(ctx.get(), 0), f32(ctx.get(), 0));
    ggml_tensor * cells   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor * none =
        ggml_set_rows(ctx.get(), cells, f32(ctx.get(), 32, 0), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 0));
    ggml_tensor *           filter = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 0, 1, 1, 1);
    ggml_tensor *           volume = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 4, 3, 2, 1);
    ggml_tensor *           zero   = ggml_conv_3d_direct(ctx.get(), filter, volume, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1);
    ggml_tensor *           added  = ggml_pad(ctx.get(), f32(ctx.get(), 32, 0), 0, 1, 0, 0);
    ggml_backend_ptr        backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    ggml_cgraph *           graph  = ggml_new_graph(ctx.get());
    for (ggml_tensor * node : { nothing, none, zero, added }) {
        // In host memory the CPU gets such nodes, unless they write to another tensor.
        const bool taken = node != nothing || !ggml_backend_buffer_is_host(buffer.get());
        check(ggml_backend_dev_supports_op(neuron, node) == taken,
              taken ? "refused, though there is nothing to compute" : "taken");
        ggml_build_forward_expand(graph, node);
    }
    fill(cells, 2);
    fill(zero, 3);
    fill(added, 4);
    const std::vector<float> before = read(cells);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    compare(read(cells), before);
    compare(read(zero), std::vector<float>((size_t) ggml_nelements(zero), 0.0f));
    compare(read(added), std::vector<float>(32, 0.0f));
}

scenario_table graphs_scenarios() {
    return {
        { "add",                [] { against_cpu(add, 2); }                                    },
        { "chain",              [] { against_cpu(chain); }                                     },
        { "chain-allocated",    [] { compare(run_allocated(neuron, chain), run(cpu, chain)); } },
        { "views",              [] { against_cpu(views); }                                     },
        { "cache",              [] { against_cpu(cache, 2); }                                  },
        { "copied-destination", copied_destination                                             },
        { "copies",             [] { against_cpu(copies); }                                    },
        { "inplace",            [] { against_cpu(inplace); }                                   },
        { "inplace-twice",      [] { against_cpu(inplace_twice); }                             },
        { "same-twice",         [] { against_cpu(same_twice); }                                },
        { "optimizer",          [] { against_cpu(optimizer); }                                 },
        { "unused",             [] { against_cpu(unused); }                                    },
        { "not-a-number",       not_a_number                                                   },
        { "reuse",              reuse                                                          },
        { "skip",               skip                                                           },
        { "empty",              empty                                                          },
        { "freed-copy",         freed_copy                                                     },
    };
}
