#include "scenario.h"

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

ggml_backend_reg_t neurons;
ggml_backend_dev_t neuron;
ggml_backend_dev_t cpu;

std::vector<float> numbers(size_t n, float seed) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) {
        values[i] = std::sin(seed + (float) i * 0.7f);
    }
    return values;
}

ggml_backend_buffer_ptr allocate(const context & ctx, const ggml_backend_ptr & backend) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    check(buffer != nullptr, "no memory");
    ggml_backend_buffer_clear(buffer.get(), 0);
    return buffer;
}

void fill(ggml_tensor * t, float seed) {
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

void compare(const std::vector<float> & got, const std::vector<float> & wanted) {
    check(got.size() == wanted.size(), "results of different sizes");
    for (size_t i = 0; i < got.size(); i++) {
        if (!(std::fabs(got[i] - wanted[i]) <= 1e-4f + 1e-3f * std::fabs(wanted[i]))) {
            fail("element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
                 std::to_string(wanted[i]));
        }
    }
}

void compute(ggml_tensor * node, ggml_backend_t by) {
    context       own;
    ggml_cgraph * graph = ggml_new_graph(own.get());
    ggml_build_forward_expand(graph, node);
    const ggml_status status = ggml_backend_graph_compute(by, graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
}

void put_rows(std::vector<float> & cells, int64_t size, const std::vector<float> & values) {
    for (int64_t row = 0; row < 3; row++) {
        std::copy_n(values.begin() + row * size, size, cells.begin() + (row * 3 + 1) * size);
    }
}

void require_kernels(ggml_backend_dev_t dev, const ggml_cgraph * graph) {
    std::string missing;
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!ggml_backend_dev_supports_op(dev, graph->nodes[i])) {
            missing += std::string(" ") + ggml_op_desc(graph->nodes[i]);
        }
    }
    check(missing.empty(), "no kernel for" + missing);
}

std::vector<float> run(ggml_backend_dev_t dev, const builder & build, int times) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const built      b     = build(ctx.get());
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, b.result);
    ggml_set_output(b.result);  // a failed launch then gives the graph's own status
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

void against_cpu(const builder & build, int times) {
    const std::vector<float> got = run(neuron, build, times);
    compare(got, run(cpu, build, times));
}

std::vector<float> run_allocated(ggml_backend_dev_t dev, const builder & build) {
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

ggml_backend_dev_t core(int n) {
    check((size_t) n < ggml_backend_reg_dev_count(neurons), "there are too few NeuronCores for this scenario");
    return ggml_backend_reg_dev_get(neurons, (size_t) n);
}

void in_threads(int n, const std::function<void(int)> & function) {
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

share share_of(ggml_backend_sched_t scheduler, ggml_backend_t backend, ggml_cgraph * graph) {
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

std::vector<float> run_scheduled(const std::vector<ggml_backend_dev_t> & devices,
                                 const builder &                         build,
                                 share *                                 shared,
                                 bool                                    watched,
                                 void *                                  memory) {
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
    // the scheduler puts neighbors on the backend of a placed node
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
