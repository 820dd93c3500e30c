// Weights in host memory, with copies on a NeuronCore.

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "scenario.h"

#include <cstring>
#include <vector>

// A weight in host memory that a NeuronCore may copy, and a product with it.
struct weighted {
    ggml_backend_ptr        backend{ ggml_backend_dev_init(neuron, nullptr) };
    context                 weights;
    context                 rest;
    ggml_tensor *           w     = ggml_new_tensor_2d(weights.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *           rows  = ggml_new_tensor_1d(rest.get(), GGML_TYPE_I64, 3);
    ggml_tensor *           fresh = f32(rest.get(), 32, 3);
    ggml_tensor *           q     = f32(rest.get(), 32, 2);
    ggml_tensor *           product;
    ggml_tensor *           write;  // writes rows of the weight
    ggml_tensor *           whole = ggml_new_tensor_2d(rest.get(), GGML_TYPE_F16, 32, 16);
    ggml_tensor *           copy;   // over the weight; no kernel computes it
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

    // Compares the product with the product of the weight's current values in host memory.
    void is_right() {
        check(ggml_backend_dev_supports_op(neuron, product), "no kernel for MUL_MAT");
        compute(product, backend.get());
        const std::vector<float> got = read(product);
        ggml_backend_ptr         host(ggml_backend_dev_init(cpu, nullptr));
        compute(product, host.get());
        compare(got, read(product));
    }
};

// Uses the same weight repeatedly.
static void kept_weights() {
    weighted t;
    for (int i = 0; i < 50; i++) {
        fill(t.q, (float) i);
        t.is_right();
    }
}

// After any write to a weight, the product uses the new values.
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
    // Written by an op of the CPU: ggml's scheduler calls supports_op of all backends before.
    check(ggml_backend_dev_supports_op(neuron, t.write), "no kernel for SET_ROWS");
    ggml_backend_ptr host(ggml_backend_dev_init(cpu, nullptr));
    compute(t.write, host.get());
    t.is_right();
    fill(t.fresh, 7);
    compute(t.write, host.get());
    t.is_right();
    // Written by an op of the device, and by an op that the CPU computes instead.
    weighted u;
    u.is_right();
    compute(u.write, u.backend.get());
    u.is_right();
    weighted x;
    fill(x.whole, 8);
    x.is_right();
    compute(x.copy, x.backend.get());
    x.is_right();
    // Written by training, which the device does not observe.
    weighted v;
    ggml_set_param(v.w);
    v.is_right();
    memset(v.w->data, 0, ggml_nbytes(v.w));
    v.is_right();
}

scenario_table weights_scenarios() {
    return {
        { "kept-weights",    kept_weights    },
        { "written-weights", written_weights },
    };
}
