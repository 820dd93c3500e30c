// Scenarios for the backend's tests: each does something with the first NeuronCore and says whether it came out right.
//
//     scenarios <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...
//
// Those with "two-cores" in their names need a second NeuronCore.
//
// Nothing here knows which kernels there are: tests/ggml_neuron runs the scenarios once to record what they ask for, builds
// that, and runs them again, under all kinds of circumstances. Results are compared with those of the CPU.
//
// Printed is one line per scenario, "<scenario>: ok" or "<scenario>: <what is wrong>"; a node without a kernel is wrong, too.

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "values.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <clocale>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static ggml_backend_reg_t neurons;  // all NeuronCores
static ggml_backend_dev_t neuron;   // the first
static ggml_backend_dev_t cpu;

// Numbers that are the same everywhere.
static std::vector<float> numbers(size_t n, float seed) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) {
        values[i] = std::sin(seed + (float) i * 0.7f);
    }
    return values;
}

// A context whose tensors are made first and get memory later. Where `memory` is given, the tensors themselves are there.
struct context {
    static size_t size() { return ggml_tensor_overhead() * 64 + ggml_graph_overhead(); }

    ggml_context_ptr ctx;

    explicit context(void * memory = nullptr) {
        ggml_init_params params = { size(), memory, true };
        ctx.reset(ggml_init(params));
    }

    ggml_context * get() const { return ctx.get(); }
};

static ggml_backend_buffer_ptr allocate(const context & ctx, const ggml_backend_ptr & backend) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    check(buffer != nullptr, "no memory");
    ggml_backend_buffer_clear(buffer.get(), 0);
    return buffer;
}

static void fill(ggml_tensor * t, float seed) {
    if (t->type == GGML_TYPE_F32) {
        const std::vector<float> values = numbers((size_t) ggml_nelements(t), seed);
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_F16) {
        const std::vector<float> values = numbers((size_t) ggml_nelements(t), seed);
        std::vector<ggml_fp16_t> halves(values.size());
        ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) halves.size());
        ggml_backend_tensor_set(t, halves.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_I64) {
        std::vector<int64_t> rows((size_t) ggml_nelements(t));
        for (size_t i = 0; i < rows.size(); i++) {
            rows[i] = (int64_t) (i * 3 + 1);
        }
        ggml_backend_tensor_set(t, rows.data(), 0, ggml_nbytes(t));
    } else {
        fail("no values for such a tensor");
    }
}

static void compare(const std::vector<float> & got, const std::vector<float> & wanted) {
    check(got.size() == wanted.size(), "results of different sizes");
    for (size_t i = 0; i < got.size(); i++) {
        if (!(std::fabs(got[i] - wanted[i]) <= 1e-4f + 1e-3f * std::fabs(wanted[i]))) {
            fail("element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
                 std::to_string(wanted[i]));
        }
    }
}

// What a scenario builds: a graph's result, and the tensors to fill before it is computed.
struct built {
    ggml_tensor *              result;
    std::vector<ggml_tensor *> inputs;
};

using builder = std::function<built(ggml_context *)>;

// Computes a node in a graph of its own.
static void compute(ggml_tensor * node, ggml_backend_t by) {
    context       own;
    ggml_cgraph * graph = ggml_new_graph(own.get());
    ggml_build_forward_expand(graph, node);
    const ggml_status status = ggml_backend_graph_compute(by, graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
}

// Writes three rows over those that `fill` numbers: see there.
static void put_rows(std::vector<float> & cells, int64_t size, const std::vector<float> & values) {
    for (int64_t row = 0; row < 3; row++) {
        std::copy_n(values.begin() + row * size, size, cells.begin() + (row * 3 + 1) * size);
    }
}

// Asks for every node, so that all that lack a kernel are recorded.
static void require_kernels(ggml_backend_dev_t dev, const ggml_cgraph * graph) {
    std::string missing;
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!ggml_backend_dev_supports_op(dev, graph->nodes[i])) {
            missing += std::string(" ") + ggml_op_desc(graph->nodes[i]);
        }
    }
    check(missing.empty(), "no kernel for" + missing);
}

// Computes a graph whose tensors all have memory of their own.
static std::vector<float> run(ggml_backend_dev_t dev, const builder & build, int times = 1) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const built      b     = build(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    ggml_set_output(b.result);  // a launch that fails is then the graph's own status
    require_kernels(dev, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    for (int i = 0; i < times; i++) {
        ggml_backend_buffer_clear(buffer.get(), 0);
        float seed = 1;
        for (ggml_tensor * t : b.inputs) {
            fill(t, seed++ + (float) i);
        }
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    }
    return read(b.result);
}

static void against_cpu(const builder & build, int times = 1) {
    const std::vector<float> got = run(neuron, build, times);
    compare(got, run(cpu, build, times));
}

// Computes a graph whose nodes' memory is given by ggml's allocator, which reuses that of sources.
static std::vector<float> run_allocated(ggml_backend_dev_t dev, const builder & build) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const built      b     = build(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    require_kernels(dev, graph);
    for (ggml_tensor * t : b.inputs) {
        ggml_set_input(t);
    }
    ggml_set_output(b.result);
    ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_dev_buffer_type(dev)));
    check(ggml_gallocr_alloc_graph(allocator.get(), graph), "no memory");
    bool reused = false;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = graph->nodes[i];
        for (const ggml_tensor * src : node->src) {
            reused = reused || (src && src->data == node->data);
        }
    }
    check(reused, "the allocator reused nothing: this scenario shows nothing");
    float seed = 1;
    for (ggml_tensor * t : b.inputs) {
        fill(t, seed++);
    }
    const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    return read(b.result);
}

static ggml_tensor * f32(ggml_context * ctx, int64_t ne0, int64_t ne1 = 1) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1);
}

static built add(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64);
    return {
        ggml_add(ctx, a, b), { a, b }
    };
}

// Three rows, where kernels are for four.
static built add_three(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 3);
    ggml_tensor * b = f32(ctx, 64);
    return {
        ggml_add(ctx, a, b), { a, b }
    };
}

static built chain(ggml_context * ctx) {
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

// A KV cache's write and the read after it.
static built cache(ggml_context * ctx) {
    ggml_tensor * cells = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 32, 16);
    ggml_tensor * rows  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 3);
    ggml_tensor * fresh = f32(ctx, 32, 3);
    ggml_tensor * q     = f32(ctx, 32, 2);
    ggml_tensor * all   = ggml_set_rows(ctx, cells, fresh, rows);
    return {
        ggml_mul_mat(ctx, all, q), { cells, rows, fresh, q }
    };
}

// An in-place node whose destination was copied, as ggml's scheduler does when another backend computed it.
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

// Memory that a plan copies from, and that no kernel is bound to, is freed. What is planned for it must not be used again.
static void freed_copy() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    context          other;  // whose memory comes and goes
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
        // takes what was freed in the round before
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

// AdamW changes the momenta besides the weights; the sum shows all three.
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

// Of its kernel IM2COL reads the shape only, so that a compiler may leave it out of the program's inputs.
static built unused_kernel(ggml_context * ctx, ggml_tensor * kernel) {
    ggml_tensor * image = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 8, 6, 2, 1);
    return { ggml_im2col(ctx, kernel, image, 1, 1, 1, 1, 1, 1, true, GGML_TYPE_F32), { image } };
}

static built unused(ggml_context * ctx) {
    return unused_kernel(ctx, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 3, 3, 2, 1));
}

// A NaN goes through kernels as it does through ggml's ops; what is computed after it is right, though a core goes on reporting it.
static void not_a_number() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    const built      b     = add(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    std::vector<float>      values = numbers(256, 1);
    for (const bool bad : { false, true, false }) {
        values[7] = bad ? NAN : 1.0f;
        ggml_backend_tensor_set(b.inputs[0], values.data(), 0, values.size() * sizeof(float));
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
        std::vector<float> got = read(b.result);
        check(std::isnan(got[7]) == bad, "element 7 is " + std::to_string(got[7]));
        got[7] = values[7] = 1.0f;
        compare(got, values);
    }
}

// Data in, out, copied and set, at offsets.
static void memory() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    a = f32(ctx.get(), 100);
    ggml_tensor *    b = f32(ctx.get(), 100);
    ggml_tensor *    c = ggml_view_1d(ctx.get(), b, 40, 20 * sizeof(float));
    ggml_set_name(a, "a");
    ggml_set_name(c, "c");

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    check(ggml_backend_buffer_get_base(buffer.get()) != nullptr, "the base is NULL");
    compare(read(a), std::vector<float>(100, 0.0f));
    const std::vector<float> values = numbers(100, 3);
    ggml_backend_tensor_set(a, values.data(), 0, 400);
    ggml_backend_tensor_copy(a, b);
    compare(read(b), values);
    compare(read(c), { values.begin() + 20, values.begin() + 60 });
    const float one = 1.0f;
    ggml_backend_tensor_set(c, &one, 8, sizeof(one));
    ggml_backend_tensor_memset(c, 0, 16, 12);
    std::vector<float> wanted = values;
    wanted[22]                = 1.0f;
    wanted[24] = wanted[25] = wanted[26] = 0.0f;
    compare(read(b), wanted);
    compare(read(a), values);
}

// One graph after another under the same number, and memory that was freed and given anew.
static void reuse() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    for (int round = 0; round < 3; round++) {
        context       ctx;
        const built   b     = add(ctx.get());
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, b.result);
        require_kernels(neuron, graph);
        ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
        for (const uint64_t uid : { 7, 7, 0, 0, 8 }) {
            graph->uid = uid;
            fill(b.inputs[0], (float) round + 1);
            fill(b.inputs[1], (float) round + 2);
            ggml_backend_buffer_clear(buffer.get(), 0);
            fill(b.inputs[0], (float) round + 3);
            fill(b.inputs[1], (float) round + 4);
            check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
            std::vector<float>       wanted = numbers(256, (float) round + 3);
            const std::vector<float> more   = numbers(64, (float) round + 4);
            for (size_t i = 0; i < wanted.size(); i++) {
                wanted[i] += more[i % 64];
            }
            compare(read(b.result), wanted);
        }
    }
}

// Nodes that are not flagged as work are left alone.
static void skip() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    const built      b     = add(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(b.inputs[0], 1);
    b.result->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    compare(read(b.result), std::vector<float>(256, 0.0f));
    b.result->flags |= GGML_TENSOR_FLAG_COMPUTE;
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    compare(read(b.result), numbers(256, 1));
}

// The made-up ops by which llama.cpp places weights: 512 tokens, whatever the kernels are for.
static void probes() {
    context       ctx;
    ggml_tensor * weight = f32(ctx.get(), 32, 6);
    ggml_tensor * input  = f32(ctx.get(), 32, 512);
    ggml_tensor * other  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_Q2_K, 256, 6);
    ggml_tensor * good   = ggml_mul_mat(ctx.get(), weight, input);
    ggml_tensor * bad    = ggml_mul_mat(ctx.get(), other, f32(ctx.get(), 256, 512));

    check(!ggml_backend_dev_supports_op(neuron, good), "there is a kernel for 512 tokens: this scenario shows nothing");
    ggml_backend_buffer_ptr dummy(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 0));
    weight->buffer = other->buffer = dummy.get();
    check(ggml_backend_dev_supports_op(neuron, good), "a probe for a type that there are kernels for is refused");
    check(!ggml_backend_dev_supports_op(neuron, bad), "a probe for a type without kernels is accepted");
    weight->buffer = other->buffer = nullptr;
}

// Nodes without elements, writes of no rows, and sums over nothing.
static void empty() {
    context       ctx;
    ggml_tensor * nothing = ggml_add(ctx.get(), f32(ctx.get(), 0), f32(ctx.get(), 0));
    ggml_tensor * cells   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor * none =
        ggml_set_rows(ctx.get(), cells, f32(ctx.get(), 32, 0), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 0));
    ggml_tensor *           filter = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 0, 1, 1, 1);
    ggml_tensor *           volume = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 4, 3, 2, 1);
    ggml_tensor *           zero   = ggml_conv_3d_direct(ctx.get(), filter, volume, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1);
    ggml_backend_ptr        backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    ggml_cgraph *           graph  = ggml_new_graph(ctx.get());
    for (ggml_tensor * node : { nothing, none, zero }) {
        // In host memory those that write into no other tensor are left to the CPU.
        const bool taken = node != nothing || !ggml_backend_buffer_is_host(buffer.get());
        check(ggml_backend_dev_supports_op(neuron, node) == taken,
              taken ? "refused, though there is nothing to compute" : "taken");
        ggml_build_forward_expand(graph, node);
    }
    fill(cells, 2);
    fill(zero, 3);
    const std::vector<float> before = read(cells);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    compare(read(cells), before);
    compare(read(zero), std::vector<float>((size_t) ggml_nelements(zero), 0.0f));
}

// Views of a cache that the scheduler copies for attention on the CPU: 256 of its 32,768 cells, whose values are one after another, as
// keys are, or far from each other, as values are without flash attention.
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
                          "an element is another one");
                }
            }
        }
    }
}

// Nodes that write to memory of the device when there is no kernel for them: nobody else could.
static void stranded(ggml_backend_dev_t dev) {
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
    check(ggml_backend_dev_supports_op(dev, all), "refused, though nobody else can");
    compute(all, backend.get());

    std::vector<float>       wanted = numbers(48 * 16, 1);
    const std::vector<float> values = numbers(48 * 3, 2);
    put_rows(wanted, 48, values);
    compare(read(cells), wanted);
}

// Rows that go to a large cache without a kernel: some to one place, the last of which counts, for several planes, and from a view.
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
    check(ggml_backend_dev_supports_op(neuron, all), "refused, though nobody else can");
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

// Rows of a large tensor on the device, which the CPU picks, and a copy to parts of it that are far apart. What is between stays.
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

// A weight on the device that is read again and again, as ggml's scheduler does for the CPU, and what writes to it.
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
    check(ggml_backend_dev_supports_op(neuron, step), "refused, though nobody else can");
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

// Where a scheduler had a graph's nodes computed: how many on the first backend, and in how many of the splits.
struct share {
    int nodes  = 0;
    int of     = 0;
    int splits = 0;
};

static share share_of(ggml_backend_sched_t scheduler, ggml_backend_t backend, ggml_cgraph * graph) {
    share found;
    bool  before = false;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const bool here = ggml_backend_sched_get_tensor_backend(scheduler, ggml_graph_node(graph, i)) == backend;
        found.of++;
        found.nodes += here;
        found.splits += here && !before;
        before = here;
    }
    return found;
}

// Computes a graph that ggml's scheduler shares out. Where `watched`, it asks after each node whether to go on. Where `memory` is
// given, the graph's tensors are there.
static std::vector<float> run_scheduled(const std::vector<ggml_backend_dev_t> & devices,
                                        const builder &                         build,
                                        share *                                 shared  = nullptr,
                                        bool                                    watched = false,
                                        void *                                  memory  = nullptr) {
    std::vector<ggml_backend_ptr> owners;
    std::vector<ggml_backend_t>   backends;
    for (ggml_backend_dev_t dev : devices) {
        owners.emplace_back(ggml_backend_dev_init(dev, nullptr));
        backends.push_back(owners.back().get());
    }
    ggml_backend_sched_ptr scheduler(
        ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, true));
    context       ctx(memory);
    const built   b     = build(ctx.get());
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    for (ggml_tensor * t : b.inputs) {
        ggml_set_input(t);
    }
    ggml_set_output(b.result);
    // where one node is, its neighbours go
    ggml_backend_sched_set_tensor_backend(scheduler.get(), b.result, backends[0]);
    check(ggml_backend_sched_alloc_graph(scheduler.get(), graph), "no memory");
    float seed = 1;
    for (ggml_tensor * t : b.inputs) {
        fill(t, seed++);
    }
    if (watched) {
        ggml_backend_sched_set_eval_callback(
            scheduler.get(), [](ggml_tensor *, bool, void *) { return true; }, nullptr);
    }
    const ggml_status status = ggml_backend_sched_graph_compute(scheduler.get(), graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    if (shared) {
        *shared = share_of(scheduler.get(), backends[0], graph);
    }
    return read(b.result);
}

// Rows written into a tensor that the CPU computed, since there is no kernel for FILL, and read on the device.
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

// A node without a kernel, in the memory of one that the device computed.
static built write_to_device(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    ggml_tensor * t = ggml_scale_inplace(ctx, ggml_add(ctx, a, b), 0.375f);
    return {
        ggml_silu(ctx, t), { a, b }
    };
}

// Three nodes with kernels, and three without, the last of which must be computed on the device.
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

// Nine nodes without a kernel, which differ from those with one in all kinds of things, and one with a kernel.
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
    t               = ggml_soft_max(ctx, t);                                  // an op that has none
    t               = ggml_mul_mat(ctx, ggml_view_2d(ctx, a, 4, 3, 32, 0), ggml_reshape_3d(ctx, t, 4, 1, 7));
    return {
        t, { a, b }
    };
}

// Tensors that together have more than older runtimes take as one: 4.5 GiB.
static void large_buffers() {
    context ctx;
    for (int i = 0; i < 3; i++) {
        ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, (int64_t) 3 << 27);
    }
    ggml_backend_ptr        backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    check(buffer != nullptr, "no memory");
}

// Says how much of a core's memory is free, and how much it has.
static void free_memory() {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(neuron, &free, &total);
    fail(std::to_string(free) + " of " + std::to_string(total) + " bytes");
}

// Says how the scheduler shares out such a graph.
static void shared_out(bool watched) {
    share found;
    compare(run_scheduled({ neuron, cpu }, partly, &found, watched), run_scheduled({ cpu }, partly));
    fail(std::to_string(found.nodes) + " of " + std::to_string(found.of) + " nodes in " + std::to_string(found.splits) +
         " splits");
}

// Computes such a graph whose set of tensors, which is in the order of their addresses, has the last node first.
static void last_node_first() {
    const size_t      period = 16 * ggml_hash_size(2 * GGML_DEFAULT_GRAPH_SIZE);  // of ggml_hash
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

// Runs a function in as many threads, each of which it gets the number of, and fails as they do.
static void in_threads(int n, const std::function<void(int)> & function) {
    std::vector<std::string> wrong((size_t) n);
    std::vector<std::thread> all;
    for (int i = 0; i < n; i++) {
        all.emplace_back([&function, &message = wrong[(size_t) i], i] {
            try {
                function(i);
            } catch (const std::exception & error) {
                message = error.what();
            }
        });
    }
    for (std::thread & t : all) {
        t.join();
    }
    for (const std::string & message : wrong) {
        check(message.empty(), message);
    }
}

// Threads that ask for many ops, each for its own and all for some.
static void threads() {
    in_threads(8, [](int n) {
        for (int i = 1; i <= 40; i++) {
            context       ctx;
            const int64_t rows = i <= 20 ? i : i + 100 * n;
            (void) ggml_backend_dev_supports_op(neuron, ggml_sqr(ctx.get(), f32(ctx.get(), 8, rows)));
        }
    });
}

// Threads that compute on one NeuronCore, each with a backend of its own.
static void parallel() {
    const std::vector<float> wanted = run(cpu, chain);
    in_threads(4, [&wanted](int) {
        for (int i = 0; i < 10; i++) {
            compare(run(neuron, chain), wanted);
        }
    });
}

// Returns a NeuronCore by its number.
static ggml_backend_dev_t core(int n) {
    check((size_t) n < ggml_backend_reg_dev_count(neurons), "there are too few NeuronCores for this scenario");
    return ggml_backend_reg_dev_get(neurons, (size_t) n);
}

// A NeuronCore for each of several threads: kernels, nodes without one, memory that comes and goes, and questions.
static void several_cores(int n_cores, int rounds) {
    const std::vector<float> wanted = run(cpu, chain);
    in_threads(n_cores, [&wanted, rounds](int n) {
        for (int i = 0; i < rounds; i++) {
            compare(run(core(n), chain), wanted);
            stranded(core(n));
            context ctx;
            (void) ggml_backend_dev_supports_op(core(n), ggml_sqr(ctx.get(), f32(ctx.get(), 8, i + 1)));
        }
    });
}

// Stands before a backend's graph_compute, and notices when two threads are in it at once.
static struct {
    ggml_backend_t (*init)(ggml_backend_dev_t, const char *);
    ggml_status (*compute)(ggml_backend_t, ggml_cgraph *);
    std::mutex                    mutex;
    std::map<ggml_backend_t, int> inside;
    bool                          twice = false;
} watched;

static ggml_status compute_watched(ggml_backend_t backend, ggml_cgraph * graph) {
    const auto count = [backend](int n) {
        const std::lock_guard<std::mutex> lock(watched.mutex);
        watched.inside[backend] += n;
        watched.twice = watched.twice || watched.inside[backend] > 1;
    };
    count(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that another one comes meanwhile
    const ggml_status status = watched.compute(backend, graph);
    count(-1);
    return status;
}

static ggml_backend_t init_watched(ggml_backend_dev_t dev, const char * params) {
    ggml_backend_t backend       = watched.init(dev, params);
    watched.compute              = backend->iface.graph_compute;
    backend->iface.graph_compute = compute_watched;
    return backend;
}

// Two NeuronCores whose threads have nodes for the CPU at the same time. A backend of ggml's is not for two threads at once.
static void two_cores_and_the_cpu() {
    watched.init            = cpu->iface.init_backend;
    cpu->iface.init_backend = init_watched;
    in_threads(2, [](int n) {
        for (int i = 0; i < 5; i++) {
            stranded(core(n));
        }
    });
    cpu->iface.init_backend = watched.init;
    check(!watched.inside.empty(), "the CPU computed nothing: this scenario shows nothing");
    check(!watched.twice, "two threads computed on one backend of the CPU at once");
}

// What the C library makes of a number, in the locale that the environment asks for.
static void locale() {
    setlocale(LC_ALL, "");
    char text[16];
    snprintf(text, sizeof(text), "%g", 0.5);
    fail(std::string("a half is ") + text);
}

// More memory than there is.
static void too_much() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(neuron);
    ggml_backend_buffer_ptr    buffer(ggml_backend_buft_alloc_buffer(buft, (size_t) 1 << 46));
    check(buffer == nullptr, "64 TiB were allocated");
    against_cpu(add);  // and all is well
}

// Returns state and parent of a process or thread, whose `stat` in /proc is given; parent 0 when there is none.
static std::pair<char, pid_t> status_of(const std::string & path) {
    std::ifstream file(path);
    std::string   text;
    std::getline(file, text);
    // after the program's name, which is in parentheses
    const size_t end    = text.rfind(')');
    char         state  = 0;
    int          parent = 0;
    if (end == std::string::npos || sscanf(text.c_str() + end + 1, " %c %d", &state, &parent) != 2) {
        return { 0, 0 };
    }
    return { state, (pid_t) parent };
}

// The numbers that a folder of /proc has entries for.
static std::vector<pid_t> numbers_in(const std::string & folder) {
    std::vector<pid_t> found;
    DIR *              dir = opendir(folder.c_str());
    while (const dirent * entry = dir ? readdir(dir) : nullptr) {
        if (atoi(entry->d_name) > 0) {
            found.push_back((pid_t) atoi(entry->d_name));
        }
    }
    if (dir) {
        closedir(dir);
    }
    return found;
}

// The processes that this one started.
static std::vector<pid_t> children() {
    std::vector<pid_t> found;
    for (const pid_t pid : numbers_in("/proc")) {
        if (status_of("/proc/" + std::to_string(pid) + "/stat").second == getpid()) {
            found.push_back(pid);
        }
    }
    return found;
}

// Stops a process and waits until all its threads stand still.
static void stop(pid_t pid) {
    kill(pid, SIGSTOP);
    const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
    for (int i = 0; i < 1000; i++) {
        bool running = false;
        for (const pid_t thread : numbers_in(tasks)) {
            running = running || status_of(tasks + "/" + std::to_string(thread) + "/stat").first != 'T';
        }
        if (!running) {
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    fail("the helper does not stop");
}

// An execution that `spoil` makes fail, or may, and one after it.
static void fails_once(const std::function<void()> & spoil, bool computes, bool surely = true) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    const built      b     = add(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    fill(b.inputs[0], 1);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "the first execution failed");
    spoil();
    const ggml_status second = ggml_backend_graph_compute(backend.get(), graph);
    if (second == GGML_STATUS_SUCCESS && !surely) {
        compare(read(b.result), numbers(256, 1));
    } else {
        check(second == GGML_STATUS_FAILED, std::string("the second execution: ") + ggml_status_to_string(second));
    }
    const ggml_status third = ggml_backend_graph_compute(backend.get(), graph);
    check(third == GGML_STATUS_SUCCESS, std::string("the third execution: ") + ggml_status_to_string(third));
    if (computes) {
        compare(read(b.result), numbers(256, 1));
    }
}

// Two kernels in turn; what they compute is not looked at.
static void in_turn(int times) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    a     = f32(ctx.get(), 64, 4);
    ggml_tensor *    b     = f32(ctx.get(), 64, 4);
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, ggml_sub(ctx.get(), a, ggml_add(ctx.get(), a, b)));
    require_kernels(neuron, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    for (int i = 0; i < times; i++) {
        check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    }
}

// The simulator's helper process is killed with an execution: another one does that if the first has not read it yet.
static void killed() {
    struct joined {
        std::thread thread;

        ~joined() {
            if (thread.joinable()) {
                thread.join();
            }
        }
    } killer;

    fails_once(
        [&killer] {
            const std::vector<pid_t> helpers = children();
            check(!helpers.empty(), "there is no helper to kill");
            for (const pid_t pid : helpers) {
                stop(pid);  // so that it does not finish before
            }
            killer.thread = std::thread([helpers] {
                std::this_thread::sleep_for(std::chrono::seconds(1));  // by then it was asked
                for (const pid_t pid : helpers) {
                    kill(pid, SIGKILL);
                }
            });
        },
        true, false);
}

//
// launches in flight
//

// A graph on a NeuronCore, which is given to it without waiting for what it comes to.
struct queued {
    ggml_backend_t          backend;
    context                 ctx;
    built                   b;
    ggml_cgraph *           graph;
    ggml_backend_buffer_ptr buffer;

    queued(const ggml_backend_ptr & backend, const builder & build) : backend(backend.get()) {
        b     = build(ctx.get());
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, b.result);
        require_kernels(ggml_backend_get_device(backend.get()), graph);
        buffer = allocate(ctx, backend);
    }

    // Writes what `run` fills inputs with in its round `i`.
    void set(int i) {
        float seed = 1;
        for (ggml_tensor * t : b.inputs) {
            const std::vector<float> values = numbers((size_t) ggml_nelements(t), seed++ + (float) i);
            ggml_backend_tensor_set_async(backend, t, values.data(), 0, ggml_nbytes(t));
        }
    }

    void compute(ggml_status wanted = GGML_STATUS_SUCCESS) {
        const ggml_status status = ggml_backend_graph_compute_async(backend, graph);
        check(status == wanted, std::string("graph_compute: ") + ggml_status_to_string(status));
    }

    std::vector<float> get() {
        std::vector<float> values((size_t) ggml_nelements(b.result));
        ggml_backend_tensor_get_async(backend, b.result, values.data(), 0, ggml_nbytes(b.result));
        ggml_backend_synchronize(backend);
        return values;
    }
};

// Two graphs take turns: the inputs of one are written, and its last results read, while the other is in flight.
static void in_flight(ggml_backend_dev_t dev, int rounds) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    queued           graphs[2] = {
        { backend, chain },
        { backend, chain }
    };
    for (int i = 0; i < rounds; i++) {
        graphs[i % 2].set(i);
        graphs[i % 2].compute();
        graphs[i % 2].compute();  // the same once more, over its own results
        if (i > 0) {
            compare(graphs[(i - 1) % 2].get(), run(cpu, chain, i));
        }
    }
    // memory and a backend that go while launches use them
    graphs[0].compute();
    graphs[0].buffer.reset();
    graphs[1].compute();
    backend.reset();
}

// The memory of a source goes that a launch in flight is bound to and does not read.
static void freed_unused() {
    const ggml_backend_ptr  backend(ggml_backend_dev_init(neuron, nullptr));
    const context           own;
    const context           ctx;
    ggml_tensor *           kernel = ggml_new_tensor_4d(own.get(), GGML_TYPE_F32, 3, 3, 2, 1);
    const built             b      = unused_kernel(ctx.get(), kernel);
    ggml_backend_buffer_ptr source = allocate(own, backend);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    ggml_cgraph *           graph  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    require_kernels(neuron, graph);
    fill(b.inputs[0], 1);
    const ggml_status status = ggml_backend_graph_compute_async(backend.get(), graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    source.reset();
    compare(read(b.result), run(cpu, unused));
}

// The second launch fails when it was long queued, and with it the graph, which has an output: the program reads it next.
static void fails_late() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    queued           graph(backend, add);

    const std::vector<float> wanted = run(cpu, add);
    ggml_set_output(graph.b.result);
    graph.set(0);
    graph.compute();
    compare(graph.get(), wanted);
    graph.compute(GGML_STATUS_FAILED);
    graph.compute();
    compare(graph.get(), wanted);
}

// The second launch fails when its graph, which has no output, was given back. Then the next graph fails, unless the result is read.
static void fails_later(bool and_read) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    queued           graph(backend, add);

    const std::vector<float> wanted = run(cpu, add);
    graph.set(0);
    graph.compute();
    graph.compute();
    if (and_read) {
        graph.get();
        fail("a result that was not computed was read");
    }
    ggml_backend_synchronize(backend.get());
    graph.compute(GGML_STATUS_FAILED);
    graph.compute();
    compare(graph.get(), wanted);
}

// What was to change a KV cache fails when its graph was given back: whatever reads the cache fails until it is set anew.
static void loses_a_cache() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    queued           graph(backend, cache);
    const auto       fill_from = [&graph](size_t first) {
        for (size_t i = first; i < graph.b.inputs.size(); i++) {
            fill(graph.b.inputs[i], (float) (i + 1));
        }
    };
    const std::vector<float> wanted = run(cpu, cache);
    fill_from(0);
    graph.compute();
    ggml_backend_synchronize(backend.get());
    for (int i = 0; i < 3; i++) {
        fill_from(1);  // the cells are the first
        graph.compute(GGML_STATUS_FAILED);
    }
    fill_from(0);
    graph.compute();
    compare(graph.get(), wanted);
}

// A launch on one NeuronCore fails late. The graph of another that computes with its result fails, and the first one's next.
static void loses_for_another() {
    const ggml_backend_ptr first(ggml_backend_dev_init(core(0), nullptr));
    const ggml_backend_ptr second(ggml_backend_dev_init(core(1), nullptr));
    queued                 from(first, add);
    queued                 to(second, add);
    ggml_set_output(to.b.result);
    for (int i = 0; i < 3; i++) {
        from.set(i);
        to.set(i);
        from.compute(i == 2 ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS);
        if (i < 2) {
            ggml_backend_tensor_copy_async(first.get(), second.get(), from.b.result, to.b.inputs[0]);
            to.compute(i == 1 ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS);
        }
    }
    to.compute();
    compare(to.get(), run(cpu, add, 3));
}

// One NeuronCore computes what another one has computed, and both are given the next round before that is done.
static void two_cores_in_flight() {
    const ggml_backend_ptr first(ggml_backend_dev_init(core(0), nullptr));
    const ggml_backend_ptr second(ggml_backend_dev_init(core(1), nullptr));
    queued                 from(first, add);
    queued                 to(second, add);
    const auto             event_of = [](int n) {
        ggml_backend_event_t event = ggml_backend_event_new(core(n));
        check(event != nullptr, "no event");
        return ggml_backend_event_ptr(event);
    };
    const ggml_backend_event_ptr computed = event_of(0);
    const ggml_backend_event_ptr consumed = event_of(1);
    for (int i = 0; i < 6; i++) {
        from.set(i);
        from.compute();
        ggml_backend_event_record(computed.get(), first.get());
        ggml_backend_event_wait(second.get(), computed.get());
        ggml_backend_tensor_copy_async(first.get(), second.get(), from.b.result, to.b.inputs[0]);
        to.compute();
        ggml_backend_event_record(consumed.get(), second.get());
        ggml_backend_event_synchronize(consumed.get());
        compare(to.get(), run(cpu, add, i + 1));
    }
}

// Two NeuronCores, and graphs for each: what the second one's adds to, the first one's computes.
struct pair_of_cores {
    const ggml_backend_ptr first{ ggml_backend_dev_init(core(0), nullptr) };
    const ggml_backend_ptr second{ ggml_backend_dev_init(core(1), nullptr) };
    std::deque<queued>     from;
    std::deque<queued>     to;

    explicit pair_of_cores(int n) {
        for (int i = 0; i < n; i++) {
            from.emplace_back(first, add);
            to.emplace_back(second, add);
            from.back().set(i);
            to.back().set(i);
        }
    }

    void copy(size_t i, size_t j) {
        ggml_backend_tensor_copy_async(first.get(), second.get(), from[i].b.result, to[j].b.inputs[0]);
    }

    void compute(size_t i) {
        from[i].compute();
        copy(i, i);
        to[i].compute();
    }

    // What `to` comes to when both were set in a round.
    static std::vector<float> wanted(int i) {
        std::vector<float>       sum  = run(cpu, add, i + 1);
        const std::vector<float> more = numbers(64, 2 + (float) i);
        for (size_t k = 0; k < sum.size(); k++) {
            sum[k] += more[k % 64];
        }
        return sum;
    }
};

// Everything is given to both cores before the first one has computed anything, then again, and memory goes that jobs use.
static void two_cores_ahead() {
    pair_of_cores t(3);
    for (size_t i = 0; i < 3; i++) {
        t.compute(i);
    }
    for (int i = 0; i < 3; i++) {
        compare(t.to[(size_t) i].get(), t.wanted(i));
    }
    for (size_t i = 0; i < 3; i++) {
        t.compute(i);
    }
}

// A graph with copies around its kernel is behind an event of the other core.
static void two_cores_behind() {
    pair_of_cores                t(1);
    queued                       cut(t.second, add_three);
    const ggml_backend_event_ptr computed(ggml_backend_event_new(core(0)));
    cut.set(4);
    t.from[0].compute();
    ggml_backend_event_record(computed.get(), t.first.get());
    ggml_backend_event_wait(t.second.get(), computed.get());
    cut.compute();
    compare(cut.get(), run(cpu, add_three, 5));
}

// A tensor is set, computed anew and then freed, when a copy of it waits for the core that it is copied to.
static void two_cores_held() {
    pair_of_cores               t(2);
    queued &                    from        = t.from[0];
    const std::function<void()> overwrite[] = {
        [&from] { fill(from.b.result, 9); },
        [&from] {
            from.set(7);
            from.compute();
        },
        [&from] { from.buffer.reset(); },
    };
    for (const std::function<void()> & next : overwrite) {
        from.set(0);
        from.compute();
        ggml_backend_synchronize(t.first.get());
        t.to[1].compute();
        t.copy(0, 1);  // over what that reads
        t.copy(0, 0);
        next();
        t.to[0].compute();
        compare(t.to[0].get(), t.wanted(0));
    }
}

// Two threads copy between the same tensors, each to another core, and each has its core wait for the other one's.
static void two_cores_crossing() {
    pair_of_cores                t(1);
    const ggml_backend_t         backends[] = { t.first.get(), t.second.get() };
    ggml_tensor * const          tensors[]  = { t.from[0].b.inputs[0], t.to[0].b.inputs[0] };
    const ggml_backend_event_ptr events[]   = { ggml_backend_event_ptr(ggml_backend_event_new(core(0))),
                                                ggml_backend_event_ptr(ggml_backend_event_new(core(1))) };
    fill(tensors[0], 5);
    fill(tensors[1], 6);
    const std::vector<float> values[] = { read(tensors[0]), read(tensors[1]) };
    in_threads(2, [&](int n) {
        queued & own = n ? t.to[0] : t.from[0];
        for (int i = 0; i < 300; i++) {
            ggml_backend_tensor_copy_async(backends[1 - n], backends[n], tensors[1 - n], tensors[n]);
            own.compute();
            ggml_backend_event_record(events[n].get(), backends[n]);
            ggml_backend_event_wait(backends[n], events[1 - n].get());
        }
        ggml_backend_synchronize(backends[n]);
    });
    for (const ggml_tensor * tensor : tensors) {
        const std::vector<float> got = read(tensor);
        check(got == values[0] || got == values[1], "neither of the tensors");
    }
}

// The first core's launch fails late. The second one, which waits for it, is done when that has failed.
static void two_cores_waiting() {
    pair_of_cores                t(1);
    const ggml_backend_event_ptr computed(ggml_backend_event_new(core(0)));
    const ggml_backend_event_ptr waited(ggml_backend_event_new(core(1)));
    t.from[0].compute();
    ggml_backend_event_record(computed.get(), t.first.get());
    ggml_backend_event_wait(t.second.get(), computed.get());
    ggml_backend_event_record(waited.get(), t.second.get());
    ggml_backend_event_synchronize(waited.get());
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute(0);
    compare(t.to[0].get(), t.wanted(0));
}

// The first core's launch fails late, when a graph that reads its copy was given back by the second one.
static void two_cores_late() {
    pair_of_cores t(1);
    t.compute(0);
    ggml_backend_synchronize(t.second.get());
    t.to[0].compute(GGML_STATUS_FAILED);
    t.to[0].compute(GGML_STATUS_FAILED);  // the copy is lost until it is made anew
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute(0);
    compare(t.to[0].get(), t.wanted(0));
}

//
// weights in host memory
//

// A weight in host memory, of which a NeuronCore may keep a copy, and a product with it.
struct weighted {
    ggml_backend_ptr        backend{ ggml_backend_dev_init(neuron, nullptr) };
    context                 weights;
    context                 rest;
    ggml_tensor *           w     = ggml_new_tensor_2d(weights.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *           rows  = ggml_new_tensor_1d(rest.get(), GGML_TYPE_I64, 3);
    ggml_tensor *           fresh = f32(rest.get(), 32, 3);
    ggml_tensor *           q     = f32(rest.get(), 32, 2);
    ggml_tensor *           product;
    ggml_tensor *           write;  // rows of the weight
    ggml_tensor *           whole = ggml_new_tensor_2d(rest.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *           copy;   // over the weight, for which there is no kernel
    ggml_backend_buffer_ptr weights_buffer;
    ggml_backend_buffer_ptr rest_buffer;

    weighted() {
        product        = ggml_mul_mat(rest.get(), w, q);
        write          = ggml_set_rows(rest.get(), w, fresh, rows);
        copy           = ggml_cpy(rest.get(), whole, w);
        weights_buffer = allocate(weights, backend);
        rest_buffer    = allocate(rest, backend);
        ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        fill(w, 1);
        fill(rows, 0);
        fill(fresh, 3);
        fill(q, 4);
    }

    // Compares the product with that of the weight as it is in host memory now.
    void is_right() {
        check(ggml_backend_dev_supports_op(neuron, product), "no kernel for MUL_MAT");
        compute(product, backend.get());
        const std::vector<float> got = read(product);
        ggml_backend_ptr         host(ggml_backend_dev_init(cpu, nullptr));
        compute(product, host.get());
        compare(got, read(product));
    }
};

// The same weight again and again.
static void kept_weights() {
    weighted t;
    for (int i = 0; i < 50; i++) {
        fill(t.q, (float) i);
        t.is_right();
    }
}

// Whatever writes to a weight, the product is that of what is written.
static void written_weights() {
    weighted t;
    t.is_right();
    fill(t.w, 5);
    t.is_right();
    ggml_backend_tensor_memset(t.w, 0, 32, 64);
    t.is_right();
    ggml_backend_buffer_clear(t.weights_buffer.get(), 0);
    t.is_right();
    fill(t.w, 6);
    t.is_right();
    // by an op, of the CPU: ggml's scheduler asks all backends before
    check(ggml_backend_dev_supports_op(neuron, t.write), "no kernel for SET_ROWS");
    ggml_backend_ptr host(ggml_backend_dev_init(cpu, nullptr));
    compute(t.write, host.get());
    t.is_right();
    fill(t.fresh, 7);
    compute(t.write, host.get());
    t.is_right();
    // by an op of the device, and by one that the CPU computes instead
    weighted u;
    u.is_right();
    compute(u.write, u.backend.get());
    u.is_right();
    weighted x;
    fill(x.whole, 8);
    x.is_right();
    compute(x.copy, x.backend.get());
    x.is_right();
    // by training, of which the device sees nothing
    weighted v;
    ggml_set_param(v.w);
    v.is_right();
    memset(v.w->data, 0, ggml_nbytes(v.w));
    v.is_right();
}

// What a program is told that pipelines NeuronCores.
static void capabilities(bool async) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(neuron, &props);
    check(props.caps.async == async && props.caps.events == async, "async and events are not as they should be");
    check(props.caps.host_buffer, "no host buffer");
    const ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(neuron);
    check(type && ggml_backend_buft_is_host(type), "the host buffer type is none");
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, 1000));
    check(buffer && ggml_backend_buffer_is_host(buffer.get()), "no memory");
    memset(ggml_backend_buffer_get_base(buffer.get()), 1, 1000);
    const ggml_backend_event_ptr event(ggml_backend_event_new(neuron));
    check((event != nullptr) == async, "events are not as they should be");
}

// Mistakes that a sanitizer must report, or it reports none of others either.

static void planted_race() {
    int count = 0;
    in_threads(2, [&count](int) { count++; });
    check(count > 0, "nothing was counted");
}

static void planted_overflow() {
    const std::vector<int> values(8, 1);
    volatile size_t        index = values.size();
    check(values.data()[index] != 1, "as it is behind the end");
}

static void planted_undefined_behaviour() {
    volatile int number = INT_MAX;
    number              = number + 1;
}

//
// any number of tokens
//

namespace tokens {

constexpr int64_t EMBD   = 128;
constexpr int64_t HEAD   = 32;
constexpr int64_t KV     = 2 * HEAD;
constexpr int64_t CELLS  = 256;
constexpr int64_t VOCAB  = 40;
constexpr int64_t EXPERT = 3;

// A call: `n` tokens that follow `past` ones, in a cache of which `n_kv` cells are looked at; logits of the last `n_out`.
struct call {
    int64_t n;
    int64_t past;
    int64_t n_kv;
    int64_t n_out;
    bool    quantized = false;  // the cache is Q8_0; without flash attention that of keys, and scores are capped
    bool    flash     = true;   // with flash attention; without it values are in rows of cells
    int64_t n_seqs    = 1;      // sequences, whose tokens take turns
    int64_t window    = CELLS;  // positions back from its own that a token looks at
    bool    blind     = false;  // the last token looks at nothing

    bool is_cell_quantized(int i) const { return quantized && (flash || i == 0); }

    bool is_transposed(int i) const { return !flash && i == 1; }
};

struct layer {
    ggml_tensor *              result;
    ggml_tensor *              cells[2];
    ggml_tensor *              ids;
    ggml_tensor *              positions;
    ggml_tensor *              rows;
    ggml_tensor *              value_rows = nullptr;  // elements of transposed values
    ggml_tensor *              scores     = nullptr;  // what SOFT_MAX has made of them
    ggml_tensor *              mask;
    ggml_tensor *              out_ids;
    ggml_tensor *              experts;
    std::vector<ggml_tensor *> weights;
};

static ggml_tensor * seen(ggml_context * ctx, ggml_tensor * cells, const call & c) {
    const size_t head = ggml_row_size(cells->type, HEAD);
    return ggml_view_3d(ctx, cells, HEAD, c.n_kv, KV / HEAD, cells->nb[1], head, 0);
}

static ggml_tensor * with_flash_attention(ggml_context * ctx,
                                          layer &        l,
                                          const call &   c,
                                          ggml_tensor *  q,
                                          ggml_tensor *  k,
                                          ggml_tensor *  v) {
    v = ggml_set_rows(ctx, l.cells[1], v, l.rows);
    return ggml_flash_attn_ext(ctx, q, seen(ctx, k, c), seen(ctx, v, c), l.mask, 0.01f, 0.0f, 0.0f);
}

static ggml_tensor * without_flash_attention(ggml_context * ctx,
                                             layer &        l,
                                             const call &   c,
                                             ggml_tensor *  q,
                                             ggml_tensor *  k,
                                             ggml_tensor *  v,
                                             ggml_tensor *  sinks) {
    l.value_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, c.n * KV);
    v = ggml_set_rows(ctx, ggml_reshape_2d(ctx, l.cells[1], 1, CELLS * KV), ggml_reshape_2d(ctx, v, 1, c.n * KV),
                      l.value_rows);
    ggml_tensor * t = ggml_mul_mat(ctx, seen(ctx, k, c), q);
    if (c.quantized) {
        t = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, t, 0.05f)), 20.0f);
    }
    t = ggml_soft_max_ext(ctx, t, l.mask, 0.01f, 0.0f);
    ggml_soft_max_add_sinks(t, c.quantized ? sinks : nullptr);
    l.scores          = t;
    const size_t cell = ggml_type_size(v->type);
    v                 = ggml_view_3d(ctx, v, c.n_kv, HEAD, KV / HEAD, CELLS * cell, CELLS * HEAD * cell, 0);
    t                 = ggml_permute(ctx, ggml_mul_mat(ctx, v, t), 0, 2, 1, 3);
    return ggml_cont_2d(ctx, t, EMBD, c.n);
}

// A transformer's layer with what surrounds it, and with experts.
static layer build(ggml_context * ctx, const call & c) {
    layer      l;
    const auto weight = [&](int64_t ne0, int64_t ne1, int64_t ne2 = 1, ggml_type type = GGML_TYPE_F16) {
        l.weights.push_back(ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2));
        return l.weights.back();
    };
    l.ids       = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n);
    l.positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n);
    l.rows      = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, c.n);
    l.out_ids   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n_out);
    l.experts   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, c.n);
    l.mask      = ggml_new_tensor_2d(ctx, c.flash ? GGML_TYPE_F16 : GGML_TYPE_F32, c.n_kv, c.n);
    for (int i = 0; i < 2; i++) {
        const ggml_type type = c.is_cell_quantized(i) ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        l.cells[i] =
            c.is_transposed(i) ? ggml_new_tensor_2d(ctx, type, CELLS, KV) : ggml_new_tensor_2d(ctx, type, KV, CELLS);
    }
    ggml_tensor * embd = ggml_get_rows(ctx, weight(EMBD, VOCAB), l.ids);
    ggml_tensor * norm = ggml_mul(ctx, ggml_rms_norm(ctx, embd, 1e-5f), weight(EMBD, 1, 1, GGML_TYPE_F32));
    const auto    rope = [&](ggml_tensor * t) {
        t = ggml_reshape_3d(ctx, t, HEAD, t->ne[0] / HEAD, c.n);
        return ggml_rope_ext(ctx, t, l.positions, nullptr, HEAD, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
    };
    ggml_tensor * q    = rope(ggml_mul_mat(ctx, weight(EMBD, EMBD, 1, GGML_TYPE_Q8_0), norm));
    ggml_tensor * k    = rope(ggml_mul_mat(ctx, weight(EMBD, KV), norm));
    ggml_tensor * v    = ggml_mul_mat(ctx, weight(EMBD, KV), norm);
    k                  = ggml_set_rows(ctx, l.cells[0], ggml_reshape_2d(ctx, k, KV, c.n), l.rows);
    q                  = ggml_permute(ctx, q, 0, 2, 1, 3);
    ggml_tensor * t    = c.flash ? with_flash_attention(ctx, l, c, q, k, v)
                                 : without_flash_attention(ctx, l, c, q, k, v, weight(4, 1, 1, GGML_TYPE_F32));
    t                  = ggml_add(ctx, ggml_mul_mat(ctx, weight(EMBD, EMBD), ggml_reshape_2d(ctx, t, EMBD, c.n)), embd);
    ggml_tensor * rows = ggml_reshape_3d(ctx, t, EMBD, 1, c.n);
    ggml_tensor * ffn  = ggml_mul_mat_id(ctx, weight(EMBD, EMBD, EXPERT), rows, l.experts);
    ffn = ggml_silu_inplace(ctx, ggml_add_id(ctx, ffn, weight(EMBD, EXPERT, 1, GGML_TYPE_F32), l.experts));
    ggml_tensor * one = ggml_view_2d(ctx, ffn, EMBD, c.n, ffn->nb[2], 0);
    ggml_tensor * two = ggml_view_2d(ctx, ffn, EMBD, c.n, ffn->nb[2], ffn->nb[1]);
    t                 = ggml_add(ctx, t, ggml_add(ctx, one, two));
    t                 = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, weight(EMBD, EMBD), t), t);
    l.result          = ggml_mul_mat(ctx, weight(EMBD, VOCAB), ggml_get_rows(ctx, t, l.out_ids));
    return l;
}

// Sets a tensor to numbers that its type holds.
static void set(ggml_tensor * t, float seed) {
    if (t->type != GGML_TYPE_Q8_0) {
        fill(t, seed);
        return;
    }
    const std::vector<float> values = numbers((size_t) ggml_nelements(t), seed);
    std::vector<uint8_t>     blocks(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, values.data(), blocks.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, blocks.data(), 0, blocks.size());
}

// Sets the cells that a call does not look at to numbers that show in its result when it does.
static void set_beyond(ggml_tensor * cells, int64_t n_kv, bool transposed) {
    const int64_t n = CELLS - n_kv;
    if (n == 0) {
        return;
    }
    const std::vector<float> values((size_t) (n * KV), 30.0f);
    std::vector<uint8_t>     rows(ggml_row_size(cells->type, n * KV));
    ggml_quantize_chunk(cells->type, values.data(), rows.data(), 0, 1, n * KV, nullptr);
    const size_t cell = ggml_type_size(cells->type);
    for (int64_t i = 0; transposed && i < KV; i++) {
        ggml_backend_tensor_set(cells, rows.data(), (size_t) (i * CELLS + n_kv) * cell, (size_t) n * cell);
    }
    if (!transposed) {
        ggml_backend_tensor_set(cells, rows.data(), (size_t) n_kv * cells->nb[1], rows.size());
    }
}

template <typename T, typename F> static void set_each(ggml_tensor * t, F value) {
    std::vector<T> values((size_t) ggml_nelements(t));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = (T) value((int64_t) i);
    }
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

static void set_inputs(const layer & l, const call & c) {
    float seed = 1;
    for (ggml_tensor * t : l.weights) {
        set(t, seed++);
    }
    for (int i = 0; i < 2; i++) {
        set(l.cells[i], seed++);
        set_beyond(l.cells[i], c.n_kv, c.is_transposed(i));
    }
    set_each<int32_t>(l.ids, [](int64_t i) { return i * 7 % VOCAB; });
    set_each<int32_t>(l.positions, [&](int64_t i) { return c.past + i; });
    set_each<int32_t>(l.experts, [](int64_t i) { return (i / 2 + i % 2) % EXPERT; });
    set_each<int32_t>(l.out_ids, [&](int64_t i) { return c.n - c.n_out + i; });
    // cells in no order, as a cache has that served several sequences
    const auto cell_of = [&](int64_t i) {
        return (c.past + i) * 3 % c.n_kv;
    };
    set_each<int64_t>(l.rows, cell_of);
    if (l.value_rows) {
        set_each<int64_t>(l.value_rows, [&](int64_t i) { return i % KV * CELLS + cell_of(i / KV); });
    }
    const auto is_hidden = [&](int64_t i) {
        // cell `at` holds the token of that position whose third multiple it is
        const int64_t at   = i % c.n_kv;
        const int64_t last = c.past + i / c.n_kv;
        for (int64_t p = std::max<int64_t>(last - c.window + 1, 0); p <= last; p++) {
            if (p * 3 % c.n_kv == at && p % c.n_seqs == last % c.n_seqs) {
                return c.blind && i / c.n_kv == c.n - 1;
            }
        }
        return true;
    };
    if (l.mask->type == GGML_TYPE_F16) {
        set_each<ggml_fp16_t>(l.mask, [&](int64_t i) { return is_hidden(i) ? 0xFC00 : 0; });
    } else {
        set_each<float>(l.mask, [&](int64_t i) { return is_hidden(i) ? -INFINITY : 0.0f; });
    }
}

static std::vector<uint8_t> bytes(const ggml_tensor * t) {
    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    return data;
}

// Everything that a call leaves behind: its logits, and the two caches.
struct outcome {
    std::vector<float>   logits;
    std::vector<uint8_t> cells[2];
};

static outcome compute(ggml_backend_dev_t dev, const call & c) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const layer      l     = build(ctx.get(), c);
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, l.result);
    require_kernels(dev, graph);
    // everything in one buffer, so that what is written beyond a tensor is in its neighbour
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    set_inputs(l, c);
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> before;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
        if (t->op == GGML_OP_NONE && t != l.cells[0] && t != l.cells[1]) {
            before.emplace_back(t, bytes(t));
        }
    }
    for (int round = 0; round < 2; round++) {  // the second finds what the first planned
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    }
    for (const auto & [t, data] : before) {
        check(bytes(t) == data, std::string(t->name) + " was changed");
    }
    return {
        read(l.result), { bytes(l.cells[0]), bytes(l.cells[1]) }
    };
}

// Bit for bit: cells that no token was written to.
static void compare_cells(const call & c, const outcome & got, const outcome & wanted) {
    std::vector<bool> written((size_t) CELLS);
    for (int64_t i = 0; i < c.n; i++) {
        written[(size_t) ((c.past + i) * 3 % c.n_kv)] = true;
    }
    const auto same = [&](int i, size_t offset, size_t size) {
        return memcmp(&got.cells[i][offset], &wanted.cells[i][offset], size) == 0;
    };
    for (int i = 0; i < 2; i++) {
        const size_t row = ggml_row_size(c.is_cell_quantized(i) ? GGML_TYPE_Q8_0 : GGML_TYPE_F16, KV);
        for (size_t cell = 0; cell < written.size(); cell++) {
            bool unchanged = written[cell] || c.is_transposed(i) || same(i, cell * row, row);
            for (size_t k = 0; c.is_transposed(i) && !written[cell] && k < (size_t) KV; k++) {
                unchanged = unchanged && same(i, (k * CELLS + cell) * sizeof(ggml_fp16_t), sizeof(ggml_fp16_t));
            }
            check(unchanged, "cell " + std::to_string(cell) + " was changed");
        }
    }
}

// Adds logits to the file that SCENARIO_LOGITS names, for who compares runs.
static void write_logits(const std::vector<float> & logits) {
    if (const char * path = getenv("SCENARIO_LOGITS")) {
        std::ofstream file(path, std::ios::binary | std::ios::app);
        file.write((const char *) logits.data(), (std::streamsize) (logits.size() * sizeof(float)));
    }
}

static void compare_logits(const call & c, const outcome & got, const outcome & wanted) {
    double error = 0;
    double size  = 0;
    check(got.logits.size() == wanted.logits.size() && !wanted.logits.empty(), "logits of different sizes");
    for (size_t i = 0; i < wanted.logits.size(); i++) {
        error += std::pow((double) got.logits[i] - (double) wanted.logits[i], 2.0);
        size += std::pow((double) wanted.logits[i], 2.0);
    }
    // the CPU's products with a quantized cache have a quantized query, too
    check(error <= (c.quantized ? 1e-2 : 1e-3) * size, "n " + std::to_string(c.n) + ", past " + std::to_string(c.past) +
                                                           ", n_kv " + std::to_string(c.n_kv) + ": error " +
                                                           std::to_string(error / size));
}

static void against_cpu(const call & c) {
    const outcome got    = compute(neuron, c);
    const outcome wanted = compute(cpu, c);
    compare_cells(c, got, wanted);
    write_logits(got.logits);
    compare_logits(c, got, wanted);
}

// A call whose nodes' memory is given by the scheduler, which reuses that of nodes that were read for the last time.
static void scheduled(const call & c, bool watched, bool output = false) {
    ggml_backend_ptr       device(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_ptr       host(ggml_backend_dev_init(cpu, nullptr));
    ggml_backend_t         backends[] = { device.get(), host.get() };
    ggml_backend_sched_ptr scheduler(
        ggml_backend_sched_new(backends, nullptr, 2, GGML_DEFAULT_GRAPH_SIZE, false, true));
    context       ctx;
    const layer   l     = build(ctx.get(), c);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, l.result);
    ggml_set_output(l.result);
    if (output) {
        ggml_set_output(l.scores);
    }
    ggml_backend_buffer_ptr leaves(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 1 << 20));
    ggml_tallocr            allocator = ggml_tallocr_new(leaves.get());
    for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
        if (t->op == GGML_OP_NONE) {
            check(ggml_tallocr_alloc(&allocator, t) == GGML_STATUS_SUCCESS, "no memory");
        }
    }
    check(ggml_backend_sched_alloc_graph(scheduler.get(), graph), "no memory");
    set_inputs(l, c);
    if (watched) {
        ggml_backend_sched_set_eval_callback(
            scheduler.get(), [](ggml_tensor *, bool, void *) { return true; }, nullptr);
    }
    const ggml_status status = ggml_backend_sched_graph_compute(scheduler.get(), graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    compare_logits(c, { read(l.result), {} }, compute(cpu, c));
    const std::vector<float> scores = output ? read(l.scores) : std::vector<float>{};
    for (size_t at = 0; at < scores.size(); at += (size_t) c.n_kv) {
        float sum = 0;
        for (size_t i = 0; i < (size_t) c.n_kv; i++) {
            sum += scores[at + i];
        }
        check(std::fabs(sum - 1) < 1e-3f, "a row of scores sums up to " + std::to_string(sum));
    }
}

// Calls for which kernels are recorded: each number of tokens with each length of the cache, and logits of all or one.
static void few(bool flash) {
    std::string missing;
    for (const bool quantized : { false, true }) {
        for (const int64_t n : flash ? std::vector<int64_t>{ 1, 4, 16, 64 } : std::vector<int64_t>{ 1, 16 }) {
            for (const int64_t n_kv : { 64, 256 }) {
                for (const int64_t n_out : { (int64_t) 1, n }) {
                    try {
                        against_cpu({ n, n_kv - n, n_kv, n_out, quantized, flash });
                    } catch (const std::exception & error) {
                        missing = error.what();
                    }
                }
            }
        }
    }
    check(missing.empty(), missing);
}

// Calls of any kind.
static void any(bool flash) {
    uint64_t   state = 1;
    const auto below = [&](int64_t n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (int64_t) (state >> 33) % n;
    };
    for (int round = 0; round < 24; round++) {
        call c{};
        c.n    = 1 + (round < 9 ? round : below(60));
        c.n_kv = std::min<int64_t>(c.n + 1 + below(CELLS - c.n), CELLS);
        c.n_kv += c.n_kv % 3 == 0 ? 1 : 0;  // 3 and n_kv have no common divisor: each token has a cell of its own
        c.n_kv  = std::min<int64_t>(c.n_kv, CELLS);
        c.past  = below(c.n_kv - c.n + 1);
        c.n_out = 1 + below(c.n);

        c.quantized = below(2) != 0;
        c.flash     = flash;
        c.n_seqs    = 1 + below(3);
        c.window    = below(2) ? CELLS : 1 + below(40);
        c.blind     = flash && below(4) == 0;  // SOFT_MAX of nothing is not a number, by ggml, too
        against_cpu(c);
    }
}

}  // namespace tokens

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: scenarios <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...\n");
        return 2;
    }
    const std::map<std::string, std::function<void()>> scenarios = {
        { "add",                         [] { against_cpu(add, 2); }                                              },
        { "chain",                       [] { against_cpu(chain); }                                               },
        { "chain-allocated",             [] { compare(run_allocated(neuron, chain), run(cpu, chain)); }           },
        { "views",                       [] { against_cpu(views); }                                               },
        { "cache",                       [] { against_cpu(cache, 2); }                                            },
        { "copied-destination",          copied_destination                                                       },
        { "copies",                      [] { against_cpu(copies); }                                              },
        { "inplace",                     [] { against_cpu(inplace); }                                             },
        { "inplace-twice",               [] { against_cpu(inplace_twice); }                                       },
        { "same-twice",                  [] { against_cpu(same_twice); }                                          },
        { "optimizer",                   [] { against_cpu(optimizer); }                                           },
        { "unused",                      [] { against_cpu(unused); }                                              },
        { "not-a-number",                not_a_number                                                             },
        { "few-tokens",                  [] { tokens::few(true); }                                                },
        { "few-tokens-of-scores",        [] { tokens::few(false); }                                               },
        { "three-tokens",                [] { tokens::against_cpu({ 3, 5, 20, 1 }); }                             },
        { "any-tokens",                  [] { tokens::any(true); }                                                },
        { "any-tokens-of-scores",        [] { tokens::any(false); }                                               },
        { "three-tokens-of-scores",
         [] {
              tokens::against_cpu({ 3, 5, 20, 1, false, false });
              tokens::against_cpu({ 7, 30, 100, 2, true, false });
          }                                                                                                       },
        { "stranded-rows",               stranded_rows                                                            },
        { "stranded-gather",             stranded_gather                                                          },
        { "recalled-weights",            recalled_weights                                                         },
        { "stranded-optimizer",          stranded_optimizer                                                       },
        { "memory",                      memory                                                                   },
        { "reuse",                       reuse                                                                    },
        { "skip",                        skip                                                                     },
        { "probes",                      probes                                                                   },
        { "empty",                       empty                                                                    },
        { "stranded",                    [] { stranded(neuron); }                                                 },
        { "freed-copy",                  freed_copy                                                               },
        { "two-cores",                   [] { several_cores(2, 5); }                                              },
        { "every-core",                  [] { several_cores((int) ggml_backend_reg_dev_count(neurons), 2); }      },
        { "two-cores-and-the-cpu",       two_cores_and_the_cpu                                                    },
        { "copied-views",                copied_views                                                             },
        { "threads",                     threads                                                                  },
        { "scheduled",                   scheduled                                                                },
        { "parallel",                    parallel                                                                 },
        { "large-buffers",               large_buffers                                                            },
        { "free-memory",                 free_memory                                                              },
        { "shared-out",                  [] { shared_out(false); }                                                },
        { "shared-out-and-watched",      [] { shared_out(true); }                                                 },
        { "last-node-first",             last_node_first                                                          },
        { "far-off",                     [] { (void) run_scheduled({ neuron, cpu }, far_off); }                   },
        { "scheduled-scores",            [] { tokens::scheduled({ 21, 30, 100, 2, true, false }, false); }        },
        { "wanted-scores",               [] { tokens::scheduled({ 21, 30, 100, 2, false, false }, false, true); } },
        { "watched-scores",              [] { tokens::scheduled({ 21, 30, 100, 2, true, false }, true); }         },
        { "planted-race",                planted_race                                                             },
        { "planted-overflow",            planted_overflow                                                         },
        { "planted-undefined-behaviour", planted_undefined_behaviour                                              },
        { "locale",                      locale                                                                   },
        { "too-much",                    too_much                                                                 },
        { "in-turn",                     [] { in_turn(2); }                                                       },
        { "in-turn-often",               [] { in_turn(40); }                                                      },
        { "killed",                      killed                                                                   },
        { "in-flight",                   [] { in_flight(neuron, 6); }                                             },
        { "in-flight-in-threads",        [] { in_threads(3, [](int) { in_flight(neuron, 3); }); }                 },
        { "fails-late",                  fails_late                                                               },
        { "freed-unused",                freed_unused                                                             },
        { "fails-later",                 [] { fails_later(false); }                                               },
        { "fails-later-and-read",        [] { fails_later(true); }                                                },
        { "loses-a-cache",               loses_a_cache                                                            },
        { "loses-for-another-core",      loses_for_another                                                        },
        { "two-cores-in-flight",         two_cores_in_flight                                                      },
        { "two-cores-ahead",             two_cores_ahead                                                          },
        { "two-cores-behind",            two_cores_behind                                                         },
        { "two-cores-held",              two_cores_held                                                           },
        { "two-cores-crossing",          two_cores_crossing                                                       },
        { "two-cores-waiting",           two_cores_waiting                                                        },
        { "two-cores-late",              two_cores_late                                                           },
        { "kept-weights",                kept_weights                                                             },
        { "written-weights",             written_weights                                                          },
        { "asynchronous",                [] { capabilities(true); }                                               },
        { "synchronous",                 [] { capabilities(false); }                                              },
        { "fails-once",                  [] { fails_once([] {}, false); }                                         },
    };

    ggml_backend_load_all_from_path(argv[2]);
    cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    neurons = ggml_backend_load(argv[1]);
    if (!neurons || !cpu) {
        fprintf(stderr, "scenarios: a backend does not load\n");
        return 2;
    }
    if (ggml_backend_reg_dev_count(neurons) == 0) {
        printf("no devices\n");
        return 3;
    }
    neuron     = ggml_backend_reg_dev_get(neurons, 0);
    int result = 0;
    for (int i = 3; i < argc; i++) {
        const auto scenario = scenarios.find(argv[i]);
        if (scenario == scenarios.end()) {
            fprintf(stderr, "scenarios: no scenario %s\n", argv[i]);
            return 2;
        }
        try {
            scenario->second();
            printf("%s: ok\n", argv[i]);
        } catch (const std::exception & error) {
            printf("%s: %s\n", argv[i], error.what());
            result = 1;
        }
        fflush(stdout);
    }
    return result;
}
