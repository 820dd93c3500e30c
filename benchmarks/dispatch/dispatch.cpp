// Measures the backend's overhead per op: the time of graph_compute minus the time of nrt_execute, on a device that does nothing.
//
//     dispatch <libggml-neuron.so> <libnrt that does nothing> [--json=FILE]
//
// It computes graphs of 100 ops until it has dispatched 10,000 ops, with a bundle of 10,000 kernels. It prints the median over
// rounds, per op, in four cases. `repeated`: the same graph again, as when llama.cpp generates tokens. `walked`: the same
// without the number by which ggml's scheduler identifies a graph, so that the backend must compare each node. `resolved`: a
// new graph, with lookups and tensor sets. `host`: tensors in host memory, which are copied. The program fails when `repeated`
// takes more than LIMIT_US.
//
// It measures a graph of 1,000 nodes in groups of 20 as a whole; one kernel computes each group. `found`: the first time; it
// fails above GRAPH_LIMIT_US. `again`: a repetition. `by one`: the same without groups. It does the same for a graph with
// N_PIECES times as many rows as its longest kernel, which is computed in pieces, with kernels for N_LENGTHS numbers of rows.

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "nrt_api.h"
#include "scratch_pack.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

static constexpr double LIMIT_US       = 3.0;
static constexpr double GRAPH_LIMIT_US = 1000.0;

static constexpr int    N_NODES   = 100;
static constexpr int    N_OPS     = 10000;
static constexpr int    N_ROUNDS  = 9;
static constexpr size_t N_KERNELS = 10000;
static constexpr int    NE        = 64;
static constexpr int    N_GROUPS  = 50;
static constexpr int    N_GROUPED = 20;
static constexpr int    N_LENGTHS = 64;
static constexpr int    N_PIECES  = 2;

static double now_us() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double, std::micro>(clock::now().time_since_epoch()).count();
}

template <typename F> static double median_us_per_op(F compute) {
    std::vector<double> rounds;
    for (int round = 0; round < N_ROUNDS; round++) {
        const double start = now_us();
        for (int done = 0; done < N_OPS; done += N_NODES) {
            compute();
        }
        rounds.push_back((now_us() - start) / N_OPS);
    }
    std::nth_element(rounds.begin(), rounds.begin() + N_ROUNDS / 2, rounds.end());
    return rounds[N_ROUNDS / 2];
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

// Returns the median time of a function.
template <typename F> static double median_us(F compute) {
    std::vector<double> rounds;
    for (int round = 0; round < 5 * N_ROUNDS; round++) {
        const double start = now_us();
        compute();
        rounds.push_back(now_us() - start);
    }
    std::nth_element(rounds.begin(), rounds.begin() + (std::ptrdiff_t) rounds.size() / 2, rounds.end());
    return rounds[rounds.size() / 2];
}

static void write_text(const std::string & path, const char * mode, const std::string & text) {
    FILE * file = fopen(path.c_str(), mode);
    if (!file || fputs(text.c_str(), file) < 0 || fclose(file) != 0) {
        perror(path.c_str());
        exit(1);
    }
}

// Adds a figure to a file, in the format of benchmarks/figures.py, with a comma before all but the first.
static void write_figure(const char * path, const char * what, double above, double bare, bool limited) {
    char text[512];
    snprintf(text, sizeof(text),
             "%s{\"what\": \"above nrt_execute, %s\", \"value\": %.17g, \"unit\": \"µs\", \"peer\": {\"what\": "
             "\"nrt_execute\", \"value\": %.17g}",
             std::string(what) == "repeated" ? "" : ",\n", what, above, bare);
    std::string figure = text;
    if (limited) {
        snprintf(text, sizeof(text), ", \"limit\": {\"of\": \"value\", \"at_most\": %.17g}", LIMIT_US);
        figure += text;
    }
    write_text(path, "a", figure + "}");
}

// Adds the figure of a whole graph, and its time without groups; 0: not measured.
static void write_graph_figure(const char * path, const char * what, double value, double without, bool limited) {
    char        text[512];
    std::string figure;
    snprintf(text, sizeof(text), ",\n{\"what\": \"a graph of 1,000 nodes %s\", \"value\": %.17g, \"unit\": \"µs\"",
             what, value);
    figure += text;
    if (without > 0) {
        snprintf(text, sizeof(text), ", \"peer\": {\"what\": \"without groups\", \"value\": %.17g}", without);
        figure += text;
    }
    if (limited) {
        snprintf(text, sizeof(text), ", \"limit\": {\"of\": \"value\", \"at_most\": %.17g}", GRAPH_LIMIT_US);
        figure += text;
    }
    write_text(path, "a", figure + "}");
}

// Measures one kind of buffers, in a separate process. Prints the results and returns the time that has the limit.
static double measure(const char * plugin, const char * libnrt) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        fprintf(stderr, "dispatch: %s has no device\n", plugin);
        exit(1);
    }
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr);
    const double   bare    = bare_execute_us(libnrt);
    const bool     host    = std::string(getenv("GGML_NEURON_BUFFERS")) == "host";
    const char *   json    = getenv("DISPATCH_FIGURES");
    const auto     print   = [bare, json](const char * what, double total, bool limited) {
        if (json) {
            write_figure(json, what, total - bare, bare, limited);
        }
        printf("%-9s %7.3f us per op, %7.3f above nrt_execute (%.3f), ratio %.1f\n", what, total, total - bare, bare,
               total / bare);
        return total - bare;
    };

    graph g(backend, N_NODES);
    // Without kernels for all four ops, this would measure the CPU.
    if (!ggml_backend_supports_op(backend, g.cgraph->nodes[0]) ||
        !ggml_backend_supports_op(backend, g.cgraph->nodes[3])) {
        fprintf(stderr, "dispatch: the backend did not find the kernels\n");
        exit(1);
    }
    g.cgraph->uid = 1;
    compute(backend, g.cgraph);
    const double repeated =
        print(host ? "host" : "repeated", median_us_per_op([&] { compute(backend, g.cgraph); }), !host);
    if (!host) {
        g.cgraph->uid = 0;
        compute(backend, g.cgraph);
        print("walked", median_us_per_op([&] { compute(backend, g.cgraph); }), false);
        uint64_t uid = 2;
        print("resolved", median_us_per_op([&] {
                  g.cgraph->uid = uid++;
                  compute(backend, g.cgraph);
              }),
              false);
    }
    ggml_backend_free(backend);
    return repeated;
}

using fusion_get_t    = void * (*)(ggml_backend_dev_t);
using fusion_enable_t = void (*)(void *, bool);
using fusion_stats_t  = int (*)(void *, const char **, uint64_t *, int);

// Measures graphs of groups that are computed in this many pieces, in a separate process. Returns whether the first
// time of a graph is within the limit.
static bool measure_groups(const char * plugin, const char * libnrt, int pieces) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        fprintf(stderr, "dispatch: %s has no device\n", plugin);
        exit(1);
    }
    ggml_backend_dev_t dev     = ggml_backend_reg_dev_get(reg, 0);
    ggml_backend_t     backend = ggml_backend_dev_init(dev, nullptr);
    const auto         get     = (fusion_get_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_get");
    const auto         set_enabled =
        (fusion_enable_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_set_enabled");
    const auto   stats  = (fusion_stats_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_fusion_stats_get");
    void *       fusion = get(dev);
    const double bare   = bare_execute_us(libnrt);
    graph        g(backend, N_GROUPS * N_GROUPED, pieces == 1 ? 1 : pieces * rows_of(N_LENGTHS));

    uint64_t     uid   = 1;
    const double found = median_us([&] {
        g.cgraph->uid = uid++;
        compute(backend, g.cgraph);
    });
    const double again = median_us([&] { compute(backend, g.cgraph); });

    std::vector<uint64_t> counts(N_LENGTHS + 1);
    stats(fusion, nullptr, counts.data(), (int) counts.size());
    if (std::accumulate(counts.begin(), counts.end(), (uint64_t) 0) !=
        (uint64_t) (2 * 5 * N_ROUNDS * N_GROUPS * pieces)) {
        fprintf(stderr, "dispatch: the backend did not compute the groups\n");
        exit(1);
    }
    printf("%d nodes in %d groups, %d %s each: found %.0f us, again %.1f us (%.1f us in nrt_execute)\n",
           g.cgraph->n_nodes, N_GROUPS, pieces, pieces == 1 ? "launch" : "launches", found, again,
           bare * N_GROUPS * pieces);
    double first  = 0;
    double by_one = 0;
    if (pieces == 1) {  // the device has other kernels only for ops of one row
        set_enabled(fusion, false);
        compute(backend, g.cgraph);
        by_one = median_us([&] { compute(backend, g.cgraph); });
        first  = median_us([&] {
            g.cgraph->uid = uid++;
            compute(backend, g.cgraph);
        });
        printf("the same node by node: found %.0f us, again %.1f us, ratio %.1f\n", first, by_one, by_one / again);
    }
    if (const char * json = getenv("DISPATCH_FIGURES")) {
        write_graph_figure(json, pieces == 1 ? "in groups, seen first" : "in groups in pieces, seen first", found,
                           first, true);
        write_graph_figure(json, pieces == 1 ? "in groups, again" : "in groups in pieces, again", again, by_one, false);
    }
    ggml_backend_free(backend);
    return found <= GRAPH_LIMIT_US;
}

// Sets the sizes of the tensors of kernels for this many rows.
static void set_tensors(int64_t rows) {
    const std::string bytes = std::to_string((size_t) rows * NE * sizeof(float));
    setenv("NOOP_NRT_TENSORS", ("input0=" + bytes + ",input1=" + bytes + ",output0=" + bytes).c_str(), 1);
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: dispatch <libggml-neuron.so> <no-op libnrt> [--json=FILE]\n");
        return 2;
    }
    const std::string own = argc == 4 ? argv[3] : "";
    if (own == "groups" || own == "pieces") {  // started by this program
        return measure_groups(argv[1], argv[2], own == "groups" ? 1 : N_PIECES) ? 0 : 1;
    }
    if (argc == 4 && argv[3][0] != '-') {  // also
        return measure(argv[1], argv[2]) <= LIMIT_US || std::string(argv[3]) == "host" ? 0 : 1;
    }
    std::string json;
    for (int i = 3; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument.rfind("--json=", 0) == 0) {
            json = argument.substr(7);
        } else if (argument != "--quick") {  // the program is always quick
            fprintf(stderr, "dispatch: unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    if (!json.empty()) {
        write_text(json, "w", "{\"figures\": [\n");
        setenv("DISPATCH_FIGURES", json.c_str(), 1);
    }
    const scratch_pack pack(pack_contents());
    setenv("GGML_NEURON_LIBNRT", argv[2], 1);
    int result = 0;
    for (const std::string what : { "device", "host", "groups", "pieces" }) {
        set_tensors(what == "pieces" ? rows_of(N_LENGTHS) : 1);
        setenv("NEURON_RT_NUM_CORES", "1", 1);
        setenv("GGML_NEURON_KERNEL_DIR", pack.path().c_str(), 1);
        setenv("GGML_NEURON_BUFFERS", what == "host" ? "host" : "device", 1);
        const std::string command = std::string("'") + argv[0] + "' '" + argv[1] + "' '" + argv[2] + "' " + what;
        result |= system(command.c_str()) != 0;
    }
    if (!json.empty()) {
        write_text(json, "a", "\n]}\n");
    }
    printf("%s: the limit is %.1f us per op for a graph that is computed again, and %.0f us for one of 1,000 nodes in "
           "groups that is seen "
           "first\n",
           result ? "FAILED" : "ok", LIMIT_US, GRAPH_LIMIT_US);
    return result;
}
