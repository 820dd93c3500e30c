// Measures the backend's overhead per op on a device that does nothing; dispatch.py starts it, and describes the cases.
//
//     dispatch pack FILE                       writes a bundle of 10,000 kernels and of groups
//     dispatch device|host PLUGIN LIBNRT       computes graphs of 100 ops until it has dispatched 10,000 ops
//     dispatch groups|pieces PLUGIN LIBNRT     computes a graph of 1,000 nodes in groups of 20
//
// Each case prints lines of a name and a time in microseconds.

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "nrt_api.h"
#include "tests/pack_builder.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

static constexpr int    N_NODES      = 100;
static constexpr int    N_OPS        = 10000;
static constexpr int    N_ROUNDS     = 9;
static constexpr int    GRAPH_ROUNDS = 45;
static constexpr size_t N_KERNELS    = 10000;
static constexpr int    NE           = 64;
static constexpr int    N_GROUPS     = 50;
static constexpr int    N_GROUPED    = 20;
static constexpr int    N_LENGTHS    = 64;
static constexpr int    N_PIECES     = 2;

static double now_us() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double, std::micro>(clock::now().time_since_epoch()).count();
}

// Returns the median time of a function.
template <typename F> static double median_us(int rounds, F compute) {
    std::vector<double> times;
    for (int round = 0; round < rounds; round++) {
        const double start = now_us();
        compute();
        times.push_back(now_us() - start);
    }
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    return times[(size_t) rounds / 2];
}

// Returns the median time per op, of a function that dispatches `N_NODES` ops.
template <typename F> static double median_us_per_op(F compute) {
    return median_us(N_ROUNDS,
                     [&] {
                         for (int n_ops = 0; n_ops < N_OPS; n_ops += N_NODES) {
                             compute();
                         }
                     }) /
           N_OPS;
}

static const char * const OPS[] = { "add", "sub", "mul", "div" };

// Returns the number of rows of the kernels for groups of one of the lengths.
static int64_t rows_of(int length) {
    return 8 * (int64_t) length;
}

// Returns the key of a group: a sum, difference, product, quotient, and so on, all with the same tensor.
static test::kernel group_of_ops(int64_t rows) {
    const neuron_kernels_tensor t    = test::dense(GGML_TYPE_F32, NE, rows);
    const uint64_t              size = (uint64_t) rows * NE * sizeof(float);
    test::graph                 key{
        { size, size }
    };
    for (int i = 0; i < N_GROUPED; i++) {
        const test::graph::input first{ i == 0, i == 0 ? 0 : (uint64_t) (i - 1), 0, t };
        key.node(OPS[i % 4],
                 {
                     first, { true, 1, 0, t }
        },
                 t, i == N_GROUPED - 1);
    }
    return key.done();
}

// Returns the graph's four ops, among others with other shapes, and the group.
static std::vector<test::kernel> pack_contents() {
    std::vector<test::kernel> kernels = { group_of_ops(1) };
    for (int i = 1; i <= N_LENGTHS; i++) {
        kernels.push_back(group_of_ops(rows_of(i)));
    }
    for (size_t i = 0; i < N_KERNELS; i++) {
        const int64_t rows = 1 + (int64_t) (i / 4);
        kernels.push_back({
            OPS[i % 4],
            { test::dense(GGML_TYPE_F32, NE, rows), test::dense(GGML_TYPE_F32, NE, rows) },
            test::dense(GGML_TYPE_F32, NE, rows)
        });
    }
    return kernels;
}

// Returns the time of one call of nrt_execute, made as the backend makes it.
static double bare_execute_us(const char * libnrt) {
    void * handle  = dlopen(libnrt, RTLD_NOW | RTLD_LOCAL);
    auto * load    = (decltype(&nrt_load)) dlsym(handle, "nrt_load");
    auto * set     = (decltype(&nrt_allocate_tensor_set)) dlsym(handle, "nrt_allocate_tensor_set");
    auto * execute = (decltype(&nrt_execute)) dlsym(handle, "nrt_execute");

    nrt_model_t *      model  = nullptr;
    nrt_tensor_set_t * input  = nullptr;
    nrt_tensor_set_t * output = nullptr;
    load("", 0, 0, 1, &model);
    set(&input);
    set(&output);
    return median_us_per_op([&] {
        for (int i = 0; i < N_NODES; i++) {
            execute(model, input, output);
        }
    });
}

struct graph {
    ggml_context *        ctx;
    ggml_backend_buffer_t buffer;
    ggml_cgraph *         cgraph;

    explicit graph(ggml_backend_t backend, int n_nodes, int64_t rows = 1) {
        ggml_init_params params = { ggml_tensor_overhead() * (size_t) (n_nodes + 2) + ggml_graph_overhead(), nullptr,
                                    true };
        ctx                     = ggml_init(params);
        ggml_tensor * a         = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, NE, rows);
        ggml_tensor * t         = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, NE, rows);
        cgraph                  = ggml_new_graph(ctx);
        for (int i = 0; i < n_nodes; i++) {
            t = i % 4 == 0   ? ggml_add(ctx, t, a)
                : i % 4 == 1 ? ggml_sub(ctx, t, a)
                : i % 4 == 2 ? ggml_mul(ctx, t, a)
                             : ggml_div(ctx, t, a);
        }
        ggml_build_forward_expand(cgraph, t);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    }

    ~graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

static void compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    if (ggml_backend_graph_compute(backend, cgraph) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "dispatch: the backend failed\n");
        exit(1);
    }
}

static void print(const char * name, double us) {
    printf("%s %.17g\n", name, us);
}

static ggml_backend_reg_t load(const char * plugin) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        fprintf(stderr, "dispatch: %s has no device\n", plugin);
        exit(1);
    }
    return reg;
}

static void measure_ops(const char * plugin, bool host) {
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(load(plugin), 0), nullptr);
    graph          g(backend, N_NODES);
    // Without kernels for all four ops, this would measure the CPU.
    if (!ggml_backend_supports_op(backend, g.cgraph->nodes[0]) ||
        !ggml_backend_supports_op(backend, g.cgraph->nodes[3])) {
        fprintf(stderr, "dispatch: the backend did not find the kernels\n");
        exit(1);
    }
    g.cgraph->uid = 1;
    compute(backend, g.cgraph);
    print(host ? "host" : "repeated", median_us_per_op([&] { compute(backend, g.cgraph); }));
    if (!host) {
        g.cgraph->uid = 0;
        compute(backend, g.cgraph);
        print("walked", median_us_per_op([&] { compute(backend, g.cgraph); }));
        uint64_t uid = 2;
        print("resolved", median_us_per_op([&] {
                  g.cgraph->uid = uid++;
                  compute(backend, g.cgraph);
              }));
    }
    ggml_backend_free(backend);
}

using fusion_get_t    = void * (*)(ggml_backend_dev_t);
using fusion_enable_t = void (*)(void *, bool);
using fusion_stats_t  = int (*)(void *, const char **, uint64_t *, int);

static void measure_groups(const char * plugin, int pieces) {
    ggml_backend_reg_t reg     = load(plugin);
    ggml_backend_dev_t dev     = ggml_backend_reg_dev_get(reg, 0);
    ggml_backend_t     backend = ggml_backend_dev_init(dev, nullptr);
    const auto         get     = (fusion_get_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_get");
    const auto         set_enabled =
        (fusion_enable_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_set_enabled");
    const auto stats  = (fusion_stats_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_stats_get");
    void *     fusion = get(dev);
    graph      g(backend, N_GROUPS * N_GROUPED, pieces == 1 ? 1 : pieces * rows_of(N_LENGTHS));

    uint64_t   uid       = 1;
    const auto see_first = [&] {
        g.cgraph->uid = uid++;
        compute(backend, g.cgraph);
    };
    const auto repeat = [&] {
        compute(backend, g.cgraph);
    };
    print("first", median_us(GRAPH_ROUNDS, see_first));
    print("again", median_us(GRAPH_ROUNDS, repeat));

    std::vector<uint64_t> counts(N_LENGTHS + 1);
    stats(fusion, nullptr, counts.data(), (int) counts.size());
    if (std::accumulate(counts.begin(), counts.end(), (uint64_t) 0) !=
        (uint64_t) (2 * GRAPH_ROUNDS * N_GROUPS * pieces)) {
        fprintf(stderr, "dispatch: the backend did not compute the groups\n");
        exit(1);
    }
    if (pieces == 1) {  // the device has other kernels only for ops of one row
        set_enabled(fusion, false);
        repeat();
        print("by-node-again", median_us(GRAPH_ROUNDS, repeat));
        print("by-node-first", median_us(GRAPH_ROUNDS, see_first));
    }
    ggml_backend_free(backend);
}

int main(int argc, char ** argv) {
    const std::string word = argc > 1 ? argv[1] : "";
    if (word == "pack" && argc == 3) {
        const std::string bytes = test::make_pack(pack_contents()).bytes();
        std::ofstream     file(argv[2], std::ios::binary);
        return file.write(bytes.data(), (std::streamsize) bytes.size()).flush() ? 0 : 1;
    }
    if (argc != 4) {
        fprintf(stderr, "usage: dispatch pack FILE | dispatch device|host|groups|pieces PLUGIN LIBNRT\n");
        return 2;
    }
    print("nrt_execute", bare_execute_us(argv[3]));
    if (word == "groups" || word == "pieces") {
        measure_groups(argv[2], word == "groups" ? 1 : N_PIECES);
    } else {
        measure_ops(argv[2], word == "host");
    }
    return 0;
}
