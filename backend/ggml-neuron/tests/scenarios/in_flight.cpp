// Launches in flight on one NeuronCore, and launches that fail late.

#include "../values.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "placed.h"
#include "scenario.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

// Two graphs take turns: the inputs of one are written, and its last results read, while the other is in flight.
static void in_flight(ggml_backend_dev_t dev, int rounds) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    placed           graphs[2] = {
        { backend, chain },
        { backend, chain }
    };
    for (int i = 0; i < rounds; i++) {
        graphs[i % 2].set(i);
        graphs[i % 2].compute();
        graphs[i % 2].compute();  // once more, over its own results
        if (i > 0) {
            compare(graphs[(i - 1) % 2].get(), run(cpu, chain, i));
        }
    }
    // memory and a backend that are freed while launches use them
    graphs[0].compute();
    graphs[0].buffer.reset();
    graphs[1].compute();
    backend.reset();
}

// Two SCALE nodes with numbers from `s`, and a RELU between them.
static builder scaled(float s) {
    return [s](ggml_context * ctx) {
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 4);
        ggml_tensor * y = ggml_relu(ctx, ggml_scale_bias(ctx, x, s, 0.25f));
        return built{ ggml_scale_bias(ctx, y, -s, s), { x } };
    };
}

// Graphs that differ only in their numbers are in flight together. Then one is computed again with the numbers of
// another, which the program wrote into it.
static void numbers_in_flight() {
    const ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    const float            scales[3] = { 0.5f, -2.0f, 3.0f };
    placed                 graphs[3] = {
        { backend, scaled(scales[0]) },
        { backend, scaled(scales[1]) },
        { backend, scaled(scales[2]) }
    };
    for (int round = 0; round < 3; round++) {
        for (placed & graph : graphs) {
            graph.set(round);
            graph.compute();
        }
        for (int i = 0; i < 3; i++) {
            compare(graphs[i].get(), run(cpu, scaled(scales[i]), round + 1));
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(graphs[0].graph); i++) {
        memcpy(ggml_graph_node(graphs[0].graph, i)->op_params, ggml_graph_node(graphs[2].graph, i)->op_params,
               sizeof(graphs[0].b.result->op_params));
    }
    graphs[0].set(1);
    graphs[0].compute();
    compare(graphs[0].get(), run(cpu, scaled(scales[2]), 2));
}

// Frees the memory of a source that a launch in flight is bound to and does not read.
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

// The process ends while launches are in flight. Nothing frees what they use.
static void exits_in_flight() {
    auto * backend = new ggml_backend_ptr(ggml_backend_dev_init(neuron, nullptr));
    auto * graph   = new placed(*backend, chain);
    graph->set(0);
    graph->compute();
}

// The second launch fails long after it was queued, and its graph fails with it: the graph has an output, which the
// program reads next.
static void fails_late() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, add);

    const std::vector<float> wanted = run(cpu, add);
    ggml_set_output(graph.b.result);
    graph.set(0);
    graph.compute();
    compare(graph.get(), wanted);
    graph.compute(GGML_STATUS_FAILED);
    graph.compute();
    compare(graph.get(), wanted);
}

// The second launch fails after graph_compute returned for its graph, which has no output. The next graph fails, unless
// the result is read before.
static void fails_later(bool and_read) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, add);

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

// A write to a KV cache fails after graph_compute returned for its graph: reads of the cache fail until it is set
// again.
static void poisons_a_cache() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, cache);
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
        fill_from(1);  // the cells are the first ones
        graph.compute(GGML_STATUS_FAILED);
    }
    fill_from(0);
    graph.compute();
    compare(graph.get(), wanted);
}

// A launch on one NeuronCore fails late. Another core's graph that uses its result fails, and so does the first core's
// next graph.
static void poisons_for_another() {
    const ggml_backend_ptr first(ggml_backend_dev_init(core(0), nullptr));
    const ggml_backend_ptr second(ggml_backend_dev_init(core(1), nullptr));
    placed                 from(first, add);
    placed                 to(second, add);
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

// An event of another kind of device.
static void waits_for_another_device() {
    const ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_device    other{};
    other.iface.event_synchronize = [](ggml_backend_dev_t, ggml_backend_event_t event) {
        ++*(int *) event->context;
    };
    int                waits = 0;
    ggml_backend_event event{ &other, &waits };
    ggml_backend_event_wait(backend.get(), &event);
    check(waits == 1, "the event was not waited for");
}

scenario_table in_flight_scenarios() {
    return {
        { "in-flight-numbers",        numbers_in_flight                                        },
        { "in-flight",                [] { in_flight(neuron, 6); }                             },
        { "in-flight-in-threads",     [] { in_threads(3, [](int) { in_flight(neuron, 3); }); } },
        { "exits-in-flight",          exits_in_flight                                          },
        { "fails-late",               fails_late                                               },
        { "freed-unused",             freed_unused                                             },
        { "fails-later",              [] { fails_later(false); }                               },
        { "fails-later-and-read",     [] { fails_later(true); }                                },
        { "poisons-a-cache",          poisons_a_cache                                          },
        { "poisons-for-another-core", poisons_for_another                                      },
        { "another-device",           waits_for_another_device                                 },
    };
}
