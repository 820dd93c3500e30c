// A graph in the memory of a NeuronCore.

#pragma once

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "scenario.h"

#include <cstddef>
#include <string>
#include <vector>

// A graph in the memory of a NeuronCore. It is computed while the program continues, or at once.
struct placed {
    ggml_backend_t          backend;
    context                 ctx;
    built                   b;
    ggml_cgraph *           graph;
    ggml_backend_buffer_ptr buffer;

    placed(const ggml_backend_ptr & backend, const builder & build) : backend(backend.get()) {
        b     = build(ctx.get());
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, b.result);
        require_kernels(ggml_backend_get_device(backend.get()), graph);
        buffer = allocate(ctx, backend);
    }

    // Sets the inputs to their values in round `i` of `run`.
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

    void compute_at_once(ggml_status wanted = GGML_STATUS_SUCCESS) {
        const ggml_status status = ggml_backend_graph_compute(backend, graph);
        check(status == wanted, std::string("graph_compute: ") + ggml_status_to_string(status));
    }

    std::vector<float> get() {
        std::vector<float> values((size_t) ggml_nelements(b.result));
        ggml_backend_tensor_get_async(backend, b.result, values.data(), 0, ggml_nbytes(b.result));
        ggml_backend_synchronize(backend);
        return values;
    }
};
