// Nodes without a kernel, in device memory, which the CPU computes.

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "scenario.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

// Views of a cache that the scheduler copies for attention on the CPU: 256 of its 32,768 cells. The values are
// contiguous, like keys, or far apart, like values without flash attention.
static void copied_views() {
    const int64_t n_ctx = 32768;
    const int64_t n_kv  = 256;
    const int64_t width = 64;
    context       ctx;
    ggml_tensor * cache = f32(ctx.get(), n_ctx * width);
    ggml_tensor * keys  = ggml_permute(
        ctx.get(), ggml_view_3d(ctx.get(), cache, width / 2, 2, n_kv, 4 * width / 2, 4 * width, 0), 0, 2, 1, 3);
    ggml_tensor * values = ggml_view_3d(ctx.get(), cache, n_kv, width / 2, 2, 4 * n_ctx, 4 * n_ctx * width / 2, 0);

    ggml_backend_ptr        device(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr memory = allocate(ctx, device);
    std::vector<float>      data((size_t) (n_ctx * width));
    for (size_t i = 0; i < data.size(); i++) {
        data[i] = (float) i;
    }
    ggml_backend_tensor_set(cache, data.data(), 0, ggml_nbytes(cache));

    ggml_backend_ptr host(ggml_backend_dev_init(cpu, nullptr));
    for (ggml_tensor * view : { keys, values }) {
        context       other;
        ggml_tensor * copy = ggml_new_tensor(other.get(), view->type, GGML_MAX_DIMS, view->ne);
        std::copy(view->nb, view->nb + GGML_MAX_DIMS, copy->nb);
        ggml_backend_buffer_ptr own(ggml_backend_alloc_ctx_tensors(other.get(), host.get()));
        ggml_backend_tensor_copy(view, copy);
        for (int64_t i2 = 0; i2 < copy->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < copy->ne[1]; i1++) {
                for (int64_t i0 = 0; i0 < copy->ne[0]; i0++) {
                    const size_t at = (size_t) i0 * copy->nb[0] + (size_t) i1 * copy->nb[1] + (size_t) i2 * copy->nb[2];
                    check(*(const float *) ((const char *) copy->data + at) == (float) (at / sizeof(float)),
                          "an element differs");
                }
            }
        }
    }
}

void stranded(ggml_backend_dev_t dev) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    ggml_tensor *    cells = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 48, 16);
    ggml_tensor *    rows  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 3);
    ggml_tensor *    fresh = f32(ctx.get(), 48, 3);
    ggml_tensor *    all   = ggml_set_rows(ctx.get(), cells, fresh, rows);

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(cells, 1);
    fill(rows, 0);
    fill(fresh, 2);
    check(ggml_backend_dev_supports_op(dev, all), "refused, though no other backend can");
    compute(all, backend.get());

    std::vector<float>       wanted = numbers(48 * 16, 1);
    const std::vector<float> values = numbers(48 * 3, 2);
    put_rows(wanted, 48, values);
    compare(read(cells), wanted);
}

// Rows that are written to a large cache without a kernel: several rows to one place (the last one counts), for several
// planes, and from a view.
static void stranded_rows() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    const int64_t    n_rows = 9000;
    ggml_tensor *    cells  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 512, n_rows, 2);
    ggml_tensor *    ids    = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 6, 1);
    ggml_tensor *    fresh  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 1024, 6, 2);
    ggml_tensor *    part   = ggml_view_3d(ctx.get(), fresh, 512, 6, 2, fresh->nb[1], fresh->nb[2], 2048);
    ggml_tensor *    all    = ggml_set_rows(ctx.get(), cells, part, ids);
    const int32_t    to[]   = { 3, 8999, 4, 3, 0, 4500 };

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    const auto              value  = [](int64_t i) {
        return (float) (i % 1001) - 500;
    };
    std::vector<ggml_fp16_t> halves((size_t) ggml_nelements(cells));
    std::vector<float>       floats((size_t) ggml_nelements(fresh));
    for (size_t i = 0; i < halves.size(); i++) {
        halves[i] = ggml_fp32_to_fp16(value((int64_t) i));
    }
    for (size_t i = 0; i < floats.size(); i++) {
        floats[i] = value((int64_t) (7 * i + 3));
    }
    ggml_backend_tensor_set(cells, halves.data(), 0, ggml_nbytes(cells));
    ggml_backend_tensor_set(fresh, floats.data(), 0, ggml_nbytes(fresh));
    ggml_backend_tensor_set(ids, to, 0, sizeof(to));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, all);
    check(ggml_backend_dev_supports_op(neuron, all), "refused, though no other backend can");
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");

    for (int64_t plane = 0; plane < 2; plane++) {
        for (int64_t row = 0; row < 6; row++) {
            for (int64_t i = 0; i < 512; i++) {
                halves[(size_t) ((plane * n_rows + to[row]) * 512 + i)] =
                    ggml_fp32_to_fp16(floats[(size_t) ((plane * 6 + row) * 1024 + 512 + i)]);
            }
        }
    }
    std::vector<ggml_fp16_t> got(halves.size());
    ggml_backend_tensor_get(cells, got.data(), 0, ggml_nbytes(cells));
    check(got == halves, "a row is wrong");
}

// Rows of a large device tensor that the CPU gathers, and a copy to parts of it that are far apart. The bytes between
// them stay unchanged.
static void stranded_gather() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    const int64_t    n_rows = 9000;
    ggml_tensor *    cells  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 256, n_rows, 2);
    ggml_tensor *    ids    = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 5, 2);
    ggml_tensor *    picked = ggml_get_rows(ctx.get(), cells, ids);
    ggml_tensor *    fresh  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 100, 3, 2);
    ggml_tensor * part   = ggml_view_3d(ctx.get(), cells, 100, 3, 2, cells->nb[1], cells->nb[2], 7 * cells->nb[1] + 40);
    ggml_tensor * copied = ggml_cpy(ctx.get(), fresh, part);
    const int32_t at[]   = { 8999, 0, 3, 4, 8999, 1, 4500, 2, 2, 8 };

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    std::vector<float>      all    = numbers((size_t) ggml_nelements(cells), 1);
    const auto              values = numbers((size_t) ggml_nelements(fresh), 2);
    ggml_backend_tensor_set(cells, all.data(), 0, ggml_nbytes(cells));
    ggml_backend_tensor_set(fresh, values.data(), 0, ggml_nbytes(fresh));
    ggml_backend_tensor_set(ids, at, 0, sizeof(at));
    for (ggml_tensor * node : { copied, picked }) {
        compute(node, backend.get());
    }
    const auto cell = [&](int64_t plane, int64_t row) {
        return all.begin() + (plane * n_rows + row) * 256;
    };
    for (int64_t i = 0; i < 6; i++) {
        std::copy_n(values.begin() + i * 100, 100, cell(i / 3, 7 + i % 3) + 10);
    }
    std::vector<float> wanted;
    for (int64_t i = 0; i < 10; i++) {
        wanted.insert(wanted.end(), cell(i / 5, at[i]), cell(i / 5, at[i]) + 256);
    }
    compare(read(cells), all);
    compare(read(picked), wanted);
}

// A device weight that is read repeatedly, as by ggml's scheduler for the CPU, and writes to it.
static void recalled_weights() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    cells = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *    rows  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 3);
    ggml_tensor *    fresh = f32(ctx.get(), 32, 3);
    ggml_tensor *    write = ggml_set_rows(ctx.get(), cells, fresh, rows);

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    fill(rows, 0);
    std::vector<float> wanted;
    const auto         read_often = [&] {
        for (int i = 0; i < 10; i++) {
            compare(read(cells), wanted);
        }
    };
    for (int round = 0; round < 2; round++) {
        wanted = numbers(32 * 16, (float) round);
        fill(cells, (float) round);
        fill(fresh, 2 + (float) round);
        read_often();
        compute(write, backend.get());
        const std::vector<float> values = numbers(32 * 3, 2 + (float) round);
        put_rows(wanted, 32, values);
        read_often();
        wanted.assign(wanted.size(), 0);
        ggml_backend_buffer_clear(buffer.get(), 0);
        read_often();
        fill(rows, 0);
    }
}

static void stranded_optimizer() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    w      = f32(ctx.get(), 64);
    ggml_tensor *    grad   = f32(ctx.get(), 64);
    ggml_tensor *    m      = f32(ctx.get(), 64);
    ggml_tensor *    v      = f32(ctx.get(), 64);
    ggml_tensor *    params = f32(ctx.get(), 7);
    ggml_set_param(w);
    ggml_tensor *           step   = ggml_opt_step_adamw(ctx.get(), w, grad, m, v, params);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(w, 1);
    fill(grad, 2);
    // alpha, beta1, beta2, eps, wd, beta1h, beta2h
    const float numbers_of_step[7] = { 0.1f, 0.5f, 0.5f, 1e-3f, 0.0f, 2.0f, 2.0f };
    ggml_backend_tensor_set(params, numbers_of_step, 0, sizeof(numbers_of_step));
    check(ggml_backend_dev_supports_op(neuron, step), "refused, though no other backend can");
    compute(step, backend.get());

    std::vector<float> first  = numbers(64, 2);  // the momenta were 0
    std::vector<float> second = first;
    for (size_t i = 0; i < first.size(); i++) {
        second[i] = first[i] * first[i] * 0.5f;
        first[i] *= 0.5f;
    }
    compare(read(m), first);
    compare(read(v), second);
}

scenario_table lacking_scenarios() {
    return {
        { "stranded-rows",      stranded_rows      },
        { "stranded-gather",    stranded_gather    },
        { "recalled-weights",   recalled_weights   },
        { "stranded-optimizer", stranded_optimizer },
        { "stranded",           [] { stranded(neuron); }             },
        { "copied-views",       copied_views       },
    };
}
