// Measures the time to choose a node's kernels in a bundle of 10,000: for an exact kernel, for none, and for pieces.
//
//     kernel_choice [--quick] [--json=FILE]
//
// The bundle has the ops of a transformer's layer in many widths, each for 1, 8, 32, 128 and 512 tokens, and attention also
// for six lengths of the cache. The program looks up nodes in random order. It prints the nanoseconds of the fastest of
// several runs for each op, and compares the mean of all ops, as in a graph, with limits. It fails when a limit is missed, or
// when a lookup has a wrong result.

#include "ggml-backend.h"
#include "ggml.h"
#include "scratch_pack.h"
#include "select/kernel_store.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <random>
#include <string>
#include <vector>

static constexpr double HIT_NS    = 300;
static constexpr double PIECES_NS = 1000;

static constexpr size_t  N_NODES   = 1000;  // per op, as many as in a graph
static constexpr size_t  N_ROUNDS  = 10;
static constexpr int     N_RUNS    = 21;
static constexpr int64_t COUNTS[]  = { 1, 8, 32, 128, 512 };
static constexpr int64_t LENGTHS[] = { 256, 512, 1024, 2048, 4096, 8192 };
static constexpr int64_t OTHER     = 300;  // tokens for which there is no kernel
static constexpr int64_t CELLS     = 768;  // cells for which there is no kernel

// Makes nodes of one op in a layer of one width.
struct op_case {
    const char * name;
    bool         is_attention;
    ggml_tensor * (*make)(ggml_context * ctx, int64_t width, int64_t n, int64_t n_kv);
};

static ggml_tensor * rows(ggml_context * ctx, int64_t width, int64_t n) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, n);
}

static ggml_tensor * heads(ggml_context * ctx, int64_t width, int64_t n) {
    return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, width / 64, n);
}

static ggml_tensor * indices(ggml_context * ctx, ggml_type type, int64_t n) {
    return ggml_new_tensor_1d(ctx, type, n);
}

static ggml_tensor * cache(ggml_context * ctx, int64_t width, int64_t n_kv) {
    ggml_tensor * whole   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, width, 8192);
    const size_t  element = ggml_type_size(GGML_TYPE_F16);
    return ggml_view_3d(ctx, whole, 64, n_kv, width / 64, whole->nb[1], 64 * element, 0);
}

static const op_case CASES[] = {
    { "mul_mat",        false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_mul_mat(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, width, 4096), rows(ctx, width, n));
      } },
    { "add",            false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_add(ctx, rows(ctx, width, n), rows(ctx, width, n));
      } },
    { "mul",            false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_mul(ctx, rows(ctx, width, n), rows(ctx, width, 1));
      } },
    { "rms_norm",       false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_rms_norm(ctx, rows(ctx, width, n), 1e-5f);
      } },
    { "swiglu",         false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_swiglu_split(ctx, rows(ctx, width, n), rows(ctx, width, n));
      } },
    { "rope",           false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          return ggml_rope(ctx, heads(ctx, width, n), indices(ctx, GGML_TYPE_I32, n), 64, 0);
      } },
    { "set_rows",       false,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t) {
          ggml_tensor * to = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, width, 8192);
          return ggml_set_rows(ctx, to, rows(ctx, width, n), indices(ctx, GGML_TYPE_I64, n));
      } },
    { "flash_attn_ext", true,
     [](ggml_context * ctx, int64_t width, int64_t n, int64_t n_kv) {
          ggml_tensor * q = ggml_permute(ctx, heads(ctx, width, n), 0, 2, 1, 3);
          return ggml_flash_attn_ext(ctx, q, cache(ctx, width, n_kv), cache(ctx, width, n_kv),
                                     ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, n), 0.125f, 0.0f, 0.0f);
      } },
};
static constexpr size_t N_CASES = sizeof(CASES) / sizeof(CASES[0]);

// Returns the exact kernel for a node.
static test::kernel kernel_of(const ggml_tensor * node) {
    const neuron_signature s = neuron_signature_of(node);
    test::kernel           k = {
        s.op, { s.tensors, s.tensors + s.n_src },
         s.tensors[s.n_src], s.alias
    };
    std::copy_n(s.op_params, NEURON_KERNELS_N_OP_PARAMS, k.op_params);
    return k;
}

// Returns the CPU time of this thread, which other programs on the machine affect less.
static double now_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e9 * (double) now.tv_sec + (double) now.tv_nsec;
}

// Returns the nanoseconds of the fastest run over nodes. `wanted`: the number of kernels that must compute each node;
// -1: any.
static double measure(const neuron_kernel_store & store, const std::vector<ggml_tensor *> & nodes, int wanted) {
    const double n    = (double) (N_ROUNDS * nodes.size());
    double       best = 1e30;
    for (int run = 0; run < N_RUNS; run++) {
        size_t       found = 0;
        const double start = now_ns();
        for (size_t round = 0; round < N_ROUNDS; round++) {
            for (const ggml_tensor * node : nodes) {
                const size_t pieces = store.select(node).pieces.size();
                found += wanted < 0 ? pieces > 0 : pieces == (size_t) wanted;
            }
        }
        best = std::min(best, (now_ns() - start) / n);
        if (found != N_ROUNDS * nodes.size()) {
            fprintf(stderr, "kernel_choice: %zu of %.0f nodes found what they must\n", found, n);
            exit(1);
        }
    }
    return best;
}

static std::string figure(const char * what, double value, size_t kernels, const char * peer, double of, double limit) {
    char text[512];
    snprintf(text, sizeof(text),
             "{\"what\": \"%s\", \"value\": %.17g, \"unit\": \"ns\", \"kernels\": %zu, \"peer\": {\"what\": \"%s\", "
             "\"value\": %.17g}",
             what, value, kernels, peer, of);
    std::string result = text;
    if (limit > 0) {
        snprintf(text, sizeof(text), ", \"limit\": {\"of\": \"value\", \"at_most\": %.17g}", limit);
        result += text;
    }
    return result + "}";
}

int main(int argc, char ** argv) {
    size_t      n_kernels = 10000;
    std::string json;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument.rfind("--json=", 0) == 0) {
            json = argument.substr(7);
        } else if (argument == "--quick") {
            n_kernels = 1000;
        } else {
            fprintf(stderr, "usage: kernel_choice [--quick] [--json=FILE]\n");
            return 2;
        }
    }
    // A node takes some kilobytes with its sources. The nodes are the looked-up ones, and another one for each kernel.
    const ggml_init_params params = { ggml_tensor_overhead() * 8 * (n_kernels + 4 * N_NODES * N_CASES), nullptr, true };
    ggml_context *         ctx    = ggml_init(params);

    std::vector<test::kernel> kernels;
    int64_t                   n_widths = 0;
    while (kernels.size() < n_kernels) {
        const int64_t width = 64 * ++n_widths;
        for (const op_case & c : CASES) {
            for (const int64_t n_kv : LENGTHS) {
                for (const int64_t n : COUNTS) {
                    kernels.push_back(kernel_of(c.make(ctx, width, n, n_kv)));
                }
                if (!c.is_attention) {
                    break;
                }
            }
        }
    }

    const scratch_pack pack(kernels);
    setenv("GGML_NEURON_KERNEL_DIR", pack.path().c_str(), 1);
    unsetenv("GGML_NEURON_EXACT");
    neuron_nrt nrt;
    nrt.simulator = true;
    nrt.target    = "trn1";
    neuron_kernel_store store;
    store.open(nrt, {});
    if (store.n_kernels() != kernels.size()) {
        fprintf(stderr, "kernel_choice: the bundle was not opened\n");
        return 1;
    }

    std::mt19937 random(1);
    const auto   one_of = [&random](const auto & values) {
        return std::begin(values)[random() % (size_t) (std::end(values) - std::begin(values))];
    };
    printf("%zu kernels, nanoseconds\n\n%-16s %8s %8s %8s\n", kernels.size(), "op", "hit", "miss", "pieces");
    double hit = 0, miss = 0, pieces = 0;
    for (const op_case & c : CASES) {
        std::vector<ggml_tensor *> hits, misses, cuts;
        for (size_t i = 0; i < N_NODES; i++) {
            const int64_t width = 64 * (1 + (int64_t) (random() % (size_t) n_widths));
            hits.push_back(c.make(ctx, width, one_of(COUNTS), one_of(LENGTHS)));
            misses.push_back(c.make(ctx, width + 64 * n_widths, one_of(COUNTS), one_of(LENGTHS)));
            cuts.push_back(c.make(ctx, width, OTHER, CELLS));
        }
        const double times[] = { measure(store, hits, 1), measure(store, misses, 0), measure(store, cuts, -1) };
        printf("%-16s %8.0f %8.0f %8.0f\n", c.name, times[0], times[1], times[2]);
        hit += times[0] / N_CASES;
        miss += times[1] / N_CASES;
        pieces += times[2] / N_CASES;
    }
    ggml_free(ctx);
    printf("%-16s %8.0f %8.0f %8.0f\n%-16s %8.0f %8s %8.0f\n", "mean", hit, miss, pieces, "limit", HIT_NS, "",
           PIECES_NS);
    if (!json.empty()) {
        std::ofstream file(json);
        file << "{\"figures\": [\n"
             << figure("find the kernel that is made for a node", hit, kernels.size(), "find that there is none", miss,
                       HIT_NS)
             << ",\n"
             << figure("choose the pieces of a node of 300 tokens", pieces, kernels.size(), "find its own kernel", hit,
                       PIECES_NS)
             << "\n]}\n";
        if (!file.flush()) {
            perror(json.c_str());
            return 1;
        }
    }
    const bool met = hit <= HIT_NS && pieces <= PIECES_NS;
    printf("%s\n", met ? "ok" : "FAILED: a limit is missed");
    return met ? 0 : 1;
}
