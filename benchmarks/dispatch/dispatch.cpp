// What the backend costs per op: the time of graph_compute above nrt_execute itself, on a device that does nothing.
//
//     dispatch <libggml-neuron.so> <libnrt that does nothing> [--json=FILE]
//
// Graphs of 100 ops are computed until 10,000 ops were dispatched, the kernels being found in a bundle of 10,000. Printed is
// the median over rounds, per op; the program fails when a graph that is computed again costs more than LIMIT_US. That is the
// case of generation, where llama.cpp computes one graph for token after token; `walked` is the same without the number by
// which ggml's scheduler names a graph, so that the backend looks at each node to know it again; `resolved` is a graph seen for
// the first time, with the lookups and the tensor sets that this takes; `host` keeps tensors in host memory and copies them.

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "nrt_api.h"
#include "tests/pack_builder.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

static constexpr double LIMIT_US = 3.0;

static constexpr int    N_NODES   = 100;
static constexpr int    N_OPS     = 10000;
static constexpr int    N_ROUNDS  = 9;
static constexpr size_t N_KERNELS = 10000;
static constexpr int    NE        = 64;

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

// A pack with the four ops that the graph has, among others that differ in their shapes.
static void write_pack(const std::string & path) {
    std::vector<test::kernel> kernels;
    for (size_t i = 0; i < N_KERNELS; i++) {
        static const char * ops[] = { "add", "sub", "mul", "div" };
        const int64_t       rows  = 1 + (int64_t) (i / 4);
        kernels.push_back({
            ops[i % 4],
            { test::dense(GGML_TYPE_F32, NE, rows), test::dense(GGML_TYPE_F32, NE, rows) },
            test::dense(GGML_TYPE_F32, NE, rows)
        });
    }
    const std::string bytes = test::make_pack(kernels).bytes();
    std::ofstream(path, std::ios::binary).write(bytes.data(), (std::streamsize) bytes.size());
}

// What one call of nrt_execute takes, called as the backend does.
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

    explicit graph(ggml_backend_t backend) {
        ggml_init_params params = { ggml_tensor_overhead() * (N_NODES + 2) + ggml_graph_overhead(), nullptr, true };
        ctx                     = ggml_init(params);
        ggml_tensor * a         = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, NE);
        ggml_tensor * t         = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, NE);
        cgraph                  = ggml_new_graph(ctx);
        for (int i = 0; i < N_NODES; i++) {
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

static void write_text(const std::string & path, const char * mode, const std::string & text) {
    FILE * file = fopen(path.c_str(), mode);
    if (!file || fputs(text.c_str(), file) < 0 || fclose(file) != 0) {
        perror(path.c_str());
        exit(1);
    }
}

// Adds a figure to a file, as benchmarks/figures.py reads them; a comma comes before each but the first.
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

// Measures in a process of its own kind of buffers; prints what was found and returns the time that is limited.
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

    graph g(backend);
    // All four ops are there, or this would time the CPU.
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

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: dispatch <libggml-neuron.so> <no-op libnrt> [--json=FILE]\n");
        return 2;
    }
    if (argc == 4 && argv[3][0] != '-') {  // started by itself
        return measure(argv[1], argv[2]) <= LIMIT_US || std::string(argv[3]) == "host" ? 0 : 1;
    }
    std::string json;
    for (int i = 3; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument.rfind("--json=", 0) == 0) {
            json = argument.substr(7);
        } else if (argument != "--quick") {  // it never takes long
            fprintf(stderr, "dispatch: unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    if (!json.empty()) {
        write_text(json, "w", "{\"figures\": [\n");
        setenv("DISPATCH_FIGURES", json.c_str(), 1);
    }
    char folder[] = "/tmp/dispatch-XXXXXX";
    if (!mkdtemp(folder)) {
        perror("dispatch");
        return 1;
    }
    const std::string pack = std::string(folder) + "/dispatch.kernels.gguf";
    write_pack(pack);
    const std::string bytes   = std::to_string(NE * sizeof(float));
    const std::string tensors = "input0=" + bytes + ",input1=" + bytes + ",output0=" + bytes;
    setenv("GGML_NEURON_LIBNRT", argv[2], 1);
    setenv("GGML_NEURON_KERNEL_DIR", pack.c_str(), 1);
    setenv("NOOP_NRT_TENSORS", tensors.c_str(), 1);
    int result = 0;
    for (const char * buffers : { "device", "host" }) {
        setenv("GGML_NEURON_BUFFERS", buffers, 1);
        const std::string command = std::string("'") + argv[0] + "' '" + argv[1] + "' '" + argv[2] + "' " + buffers;
        result |= system(command.c_str()) != 0;
    }
    unlink(pack.c_str());
    rmdir(folder);
    if (!json.empty()) {
        write_text(json, "a", "\n]}\n");
    }
    printf("%s: the limit is %.1f us per op for a graph that is computed again\n", result ? "FAILED" : "ok", LIMIT_US);
    return result;
}
