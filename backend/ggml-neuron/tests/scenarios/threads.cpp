// Threads that share one NeuronCore, threads with their own NeuronCores, and mistakes that sanitizers must report.

#include "../values.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "scenario.h"

#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

// Threads that call supports_op for many ops, some different and some the same.
static void threads() {
    in_threads(8, [](int n) {
        for (int i = 1; i <= 40; i++) {
            context       ctx;
            const int64_t rows = i <= 20 ? i : i + 100 * n;
            (void) ggml_backend_dev_supports_op(neuron, ggml_sqr(ctx.get(), f32(ctx.get(), 8, rows)));
        }
    });
}

// Threads that compute on one NeuronCore, each with its own backend.
static void parallel() {
    const std::vector<float> wanted = run(cpu, chain);
    in_threads(4, [&wanted](int) {
        for (int i = 0; i < 10; i++) {
            compare(run(neuron, chain), wanted);
        }
    });
}

// One NeuronCore per thread: kernels, nodes without one, memory that is allocated and freed, and supports_op.
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

// Wraps a backend's graph_compute, and detects two threads in it at once.
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
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that another thread enters meanwhile
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

// Two NeuronCores whose threads have nodes for the CPU at the same time. Two threads must not use one backend of ggml
// at once.
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

// Mistakes that a sanitizer must report: otherwise its silence about other code means nothing.

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

scenario_table threads_scenarios() {
    return {
        { "two-cores",                   [] { several_cores(2, 5); }                                         },
        { "every-core",                  [] { several_cores((int) ggml_backend_reg_dev_count(neurons), 2); } },
        { "two-cores-and-the-cpu",       two_cores_and_the_cpu                                               },
        { "threads",                     threads                                                             },
        { "parallel",                    parallel                                                            },
        { "planted-race",                planted_race                                                        },
        { "planted-overflow",            planted_overflow                                                    },
        { "planted-undefined-behaviour", planted_undefined_behaviour                                         },
    };
}
