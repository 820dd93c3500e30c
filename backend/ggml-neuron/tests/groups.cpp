// Groups of nodes that one kernel computes: graphs with groups in them, as a manifest and as a computation.
//
//     groups words                                      reads groups, prints the words that the backend finds them by
//     groups manifest <scenario>...                     prints a manifest of the scenarios' groups
//     groups run <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...
//
// tests/ggml_neuron builds the manifest and then runs the scenarios. Each graph is computed with groups and without, and by the
// CPU. Printed is one line per scenario, "<scenario>: ok" or "<scenario>: <what is wrong>". `random-<n>` is any of a number of
// graphs of random ops. Before a scenario may stand how it is computed: `scheduled:`, by ggml's scheduler; `reused:`, in memory that
// ggml's allocator gives out anew; `apart:`, where groups are
// expected to be computed node by node; `alone:`, scheduled, where the CPU computes what is in no group; `off:`, where the variable has turned groups off; `changing:`, with a mask that is causal in some
// computations.

#include "../groups.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "values.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

//
// graphs
//

// A graph, and which of its computed nodes are groups.
struct graph {
    ggml_context_ptr ctx;
    ggml_cgraph *    cgraph = nullptr;
    ggml_tensor *    result = nullptr;

    std::vector<ggml_tensor *>       inputs;
    std::vector<ggml_tensor *>       written;           // inputs that the graph changes
    std::vector<ggml_tensor *>       causal;            // masks that hide from tokens what later ones write
    ggml_tensor *                    places = nullptr;  // where values are written to a transposed cache
    int64_t                          n_cell = 0;        // that it has
    std::vector<std::pair<int, int>> groups;            // each the first and the last of its computed nodes
    int                              launches;          // of groups, that there are to be

    graph() {
        ggml_init_params params = { ggml_tensor_overhead() * 256 + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
        cgraph = ggml_new_graph(ctx.get());
    }

    ggml_context * get() const { return ctx.get(); }

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(get(), type, ne0, ne1, ne2);
        ggml_set_input(t);
        inputs.push_back(t);
        return t;
    }

    // Adds what is made up to a node to the graph, in this order.
    ggml_tensor * add(ggml_tensor * node) {
        ggml_build_forward_expand(cgraph, node);
        return node;
    }

    std::vector<ggml_tensor *> work() const {
        std::vector<ggml_tensor *> nodes;
        for (int i = 0; i < cgraph->n_nodes; i++) {
            ggml_tensor * node = cgraph->nodes[i];
            if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) && !neuron_is_view_op(node->op)) {
                nodes.push_back(node);
            }
        }
        return nodes;
    }

    // Ends the graph with a result. Groups are the nodes from `first` on, as many as `sizes` say.
    void end(ggml_tensor * t, int first, const std::vector<int> & sizes) {
        result = add(t);
        ggml_set_output(result);
        for (ggml_tensor * changed : written) {
            ggml_set_output(changed);  // no other tensor shares its memory
        }
        for (const int n : sizes) {
            groups.emplace_back(first, first + n - 1);
            first += n;
        }
        launches = (int) sizes.size();
    }
};

using builder = std::function<void(graph &)>;

// A norm, its weights and a product, of `n` tokens: what nearly every layer begins with.
struct norm_options {
    int64_t   n       = 4;
    ggml_type type    = GGML_TYPE_F16;
    float     eps     = 1e-5f;
    bool      gaps    = false;  // between the rows of x
    bool      swapped = false;  // the other order of a product's sources
    bool      add     = false;  // in place of the product
    bool      same    = false;  // x is the weight, too
    bool      inplace = false;
    bool      shared  = false;  // x and the weight are parts of one tensor
    bool      twice   = false;  // the norm is the weight, too
    bool      added   = false;  // the weight is added
};

static ggml_tensor * norm(graph & g, ggml_tensor * x, const norm_options & o = {}) {
    if (!x) {
        x = g.input(GGML_TYPE_F32, o.gaps ? 80 : 64, o.n + (o.shared ? 1 : 0));
    }
    ggml_tensor * root = x;
    if (o.gaps || o.shared) {
        x = ggml_view_2d(g.get(), root, 64, o.n, root->nb[1], 0);
    }
    ggml_tensor * w = o.shared ? ggml_view_1d(g.get(), root, 64, (size_t) o.n * root->nb[1])
                      : o.same ? x
                               : g.input(GGML_TYPE_F32, 64, o.same ? o.n : 1);
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), x, o.eps));
    t               = o.add       ? ggml_add(g.get(), t, w)
                      : o.inplace ? ggml_mul_inplace(g.get(), t, w)
                      : o.swapped ? ggml_mul(g.get(), w, t)
                                  : ggml_mul(g.get(), t, w);
    return g.add(t);
}

static ggml_tensor * product(graph & g, ggml_tensor * t, const norm_options & o = {}) {
    return g.add(ggml_mul_mat(g.get(), g.input(o.type, 64, 64), t));
}

static void hit(graph & g) {
    g.end(product(g, norm(g, nullptr)), 0, { 3 });
}

// The same twice, with other weights: one kernel.
static void twice_of(graph & g, int64_t n) {
    ggml_tensor * t = product(g, norm(g, nullptr, { n }));
    g.end(product(g, norm(g, t)), 0, { 3, 3 });
}

static void twice(graph & g) {
    twice_of(g, 4);
}

// Nothing of it is a group: what is between two groups is computed by itself.
static void between(graph & g) {
    ggml_tensor * t = product(g, norm(g, nullptr));
    t               = g.add(ggml_silu(g.get(), t));
    g.end(product(g, norm(g, t)), 0, { 3 });
    g.groups.emplace_back(4, 6);
    g.launches = 2;
}

// A cache is written, and read through its own tensor and at an offset.
static void cache_of(graph & g, int64_t n, int64_t n_seen) {
    ggml_tensor * cells = g.input(GGML_TYPE_F16, 32, 16);
    ggml_tensor * rows  = g.input(GGML_TYPE_I64, n);
    ggml_tensor * fresh = g.input(GGML_TYPE_F32, 32, n);
    ggml_tensor * q     = g.input(GGML_TYPE_F32, 32, 2);
    ggml_tensor * s     = g.add(ggml_scale(g.get(), fresh, 0.5f));
    g.add(ggml_set_rows(g.get(), cells, s, rows));
    ggml_tensor * seen = ggml_view_2d(g.get(), cells, 32, n_seen, cells->nb[1], cells->nb[1]);
    g.written          = { cells };
    g.end(ggml_mul_mat(g.get(), seen, q), 0, { 3 });
}

static void cache(graph & g) {
    cache_of(g, 3, 8);
}

struct attention_options {
    int64_t n        = 2;
    int64_t n_seen   = 64;     // cells
    int64_t n_cell   = 96;     // of the cache
    bool    masked   = true;
    bool    writes   = true;   // to the cache
    bool    causal   = false;  // the mask
    bool    computed = false;  // the mask is the result of a node before the group
};

// A layer's attention: the KV cache is written and read.
static void attention_of(graph & g, const attention_options & o) {
    ggml_tensor * x    = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * rows = g.input(GGML_TYPE_I64, o.n);
    ggml_tensor * mask = g.input(o.computed ? GGML_TYPE_F32 : GGML_TYPE_F16, o.n_seen, o.n);
    if (o.causal) {
        g.causal = { mask };
    }
    if (o.computed) {
        mask = g.add(ggml_cast(g.get(), mask, GGML_TYPE_F16));
    }
    ggml_tensor * k    = g.input(GGML_TYPE_F16, 64, o.n_cell);
    ggml_tensor * v    = g.input(GGML_TYPE_F16, 64, o.n_cell);
    const auto    head = [&](ggml_tensor * t) {
        return ggml_view_3d(g.get(), t, 32, o.n_seen, 2, t->nb[1], t->nb[1] / 2, 0);
    };
    ggml_tensor * t = norm(g, x);
    ggml_tensor * q = product(g, t);
    if (o.writes) {
        g.add(ggml_set_rows(g.get(), k, product(g, t), rows));
        g.add(ggml_set_rows(g.get(), v, product(g, t), rows));
        g.written = { k, v };
    }
    q = ggml_permute(g.get(), ggml_reshape_3d(g.get(), q, 32, 2, o.n), 0, 2, 1, 3);
    t = g.add(ggml_flash_attn_ext(g.get(), q, head(k), head(v), o.masked ? mask : nullptr, 0.1f, 0.0f, 0.0f));
    t = product(g, ggml_reshape_2d(g.get(), t, 64, o.n));
    g.end(ggml_add(g.get(), t, x), o.computed, { o.writes ? 10 : 6 });
}

static void attention(graph & g) {
    attention_of(g, {});
}

// The same without flash attention: the cache of values is transposed, and scores are capped.
static void scores_of(graph & g, const attention_options & o) {
    ggml_tensor * x      = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * rows   = g.input(GGML_TYPE_I64, o.n);
    ggml_tensor * places = g.input(GGML_TYPE_I64, 64 * o.n);
    ggml_tensor * mask   = g.input(GGML_TYPE_F32, o.n_seen, o.n);
    if (o.causal) {
        g.causal = { mask };
        g.places = places;
        g.n_cell = o.n_cell;
    }
    ggml_tensor * k   = g.input(GGML_TYPE_F16, 64, o.n_cell);
    ggml_tensor * v   = g.input(GGML_TYPE_F16, 64 * o.n_cell);
    const size_t  row = (size_t) o.n_cell * v->nb[0];
    ggml_tensor * t   = norm(g, x);
    ggml_tensor * q   = g.add(ggml_mul_mat(g.get(), g.input(GGML_TYPE_F16, 64, 128), t));
    g.add(ggml_set_rows(g.get(), k, product(g, t), rows));
    ggml_tensor * fresh = ggml_reshape_2d(g.get(), product(g, t), 1, 64 * o.n);
    g.add(ggml_set_rows(g.get(), ggml_reshape_2d(g.get(), v, 1, 64 * o.n_cell), fresh, places));
    g.written           = { k, v };
    q                   = ggml_permute(g.get(), ggml_reshape_3d(g.get(), q, 32, 4, o.n), 0, 2, 1, 3);
    ggml_tensor * keys  = ggml_view_3d(g.get(), k, 32, o.n_seen, 2, k->nb[1], k->nb[1] / 2, 0);
    ggml_tensor * value = ggml_view_3d(g.get(), v, o.n_seen, 32, 2, row, 32 * row, 0);
    t                   = g.add(ggml_mul_mat(g.get(), keys, q));
    t                   = g.add(ggml_tanh(g.get(), g.add(ggml_scale(g.get(), t, 0.2f))));
    t                   = g.add(ggml_soft_max_ext(g.get(), t, o.masked ? mask : nullptr, 2.0f, 0.0f));
    t                   = ggml_permute(g.get(), g.add(ggml_mul_mat(g.get(), value, t)), 0, 2, 1, 3);
    t                   = g.add(ggml_cont_2d(g.get(), t, 128, o.n));
    t                   = g.add(ggml_mul_mat(g.get(), g.input(GGML_TYPE_F16, 128, 64), t));
    g.end(ggml_add(g.get(), t, x), 0, { 15 });
}

static attention_options unmasked(int64_t n, int64_t n_seen) {
    return { n, n_seen, 96, false, true };
}

static attention_options reading(int64_t n_seen, int64_t n_cell) {
    return { 2, n_seen, n_cell, true, false };
}

// Results in the memory of earlier nodes, of a slot, and of a part of one.
static void in_place_of(graph & g, int64_t n, bool tied = false) {
    ggml_tensor * a    = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * b    = tied ? a : g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * to   = g.input(GGML_TYPE_F32, 64, 9);
    ggml_tensor * part = ggml_view_2d(g.get(), to, 64, n, to->nb[1], 3 * to->nb[1]);
    ggml_tensor * t    = g.add(ggml_add(g.get(), a, b));
    t                  = g.add(ggml_scale_inplace(g.get(), t, 2.0f));
    g.add(ggml_add_inplace(g.get(), b, t));
    g.add(ggml_cpy(g.get(), t, part));
    g.written = { b, to };
    g.end(ggml_sub(g.get(), t, b), 0, { 5 });
}

static void in_place(graph & g) {
    in_place_of(g, 4);
}

// Halves of rows, as a GLU has them, and a transposed product.
static void views_of(graph & g, int64_t n) {
    ggml_tensor * x    = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * t    = product(g, x);
    ggml_tensor * up   = ggml_view_2d(g.get(), t, 32, n, t->nb[1], 0);
    ggml_tensor * gate = ggml_view_2d(g.get(), t, 32, n, t->nb[1], 32 * sizeof(float));
    t                  = g.add(ggml_mul(g.get(), ggml_cont(g.get(), up), ggml_cont(g.get(), gate)));
    g.end(ggml_cont(g.get(), ggml_transpose(g.get(), t)), 0, { 5 });
}

static void views(graph & g) {
    views_of(g, 3);
}

// Three results are seen outside: one is read after the group, one is an output, one the last.
static void several_results_of(graph & g, int64_t n) {
    ggml_tensor * a = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * t = g.add(ggml_scale(g.get(), a, 0.5f));
    ggml_tensor * u = g.add(ggml_sqr(g.get(), t));
    ggml_tensor * v = g.add(ggml_add(g.get(), u, a));
    ggml_tensor * w = g.add(ggml_silu(g.get(), v));
    ggml_set_output(v);
    ggml_tensor * x = g.add(ggml_mul(g.get(), w, u));
    g.end(ggml_add(g.get(), x, v), 0, { 4 });
}

static void several_results(graph & g) {
    several_results_of(g, 4);
}

// Temporary results become the group's inputs, each read by one node of it: without care the allocator gives their memory to
// results of the group.
static void kept(graph & g) {
    ggml_tensor *              a = g.input(GGML_TYPE_F32, 64, 4);
    std::vector<ggml_tensor *> t;
    for (int i = 0; i < 4; i++) {
        t.push_back(g.add(ggml_scale(g.get(), a, 0.25f * (float) (i + 1))));
    }
    ggml_tensor * first  = g.add(ggml_add(g.get(), t[0], t[1]));
    ggml_tensor * second = g.add(ggml_mul(g.get(), first, t[2]));
    ggml_tensor * third  = g.add(ggml_sub(g.get(), second, t[3]));
    ggml_tensor * all    = g.add(ggml_add(g.get(), g.add(ggml_silu(g.get(), first)), g.add(ggml_sqr(g.get(), second))));
    g.end(ggml_add(g.get(), all, third), 4, { 3 });
}

//
// groups of fewer tokens, or of a shorter cache, than there are kernels for
//

static void         square(graph & g, const norm_options & o);
static norm_options one_tensor(bool shared);

static void shorter(std::map<std::string, builder> & b) {
    b["shorter-twice"] = [](graph & g) {
        twice_of(g, 3);
    };
    b["shorter-twice-1"] = [](graph & g) {
        twice_of(g, 1);
    };
    b["shorter-several-results"] = [](graph & g) {
        several_results_of(g, 1);
    };
    // rows of padding write what the group writes, and nothing else
    b["shorter-cache"] = [](graph & g) {
        cache_of(g, 2, 8);
    };
    for (const int64_t n : { 1, 2 }) {
        for (const int64_t n_seen : { 32, 64 }) {
            b["shorter-attention-" + std::to_string(n) + "x" + std::to_string(n_seen)] = [n, n_seen](graph & g) {
                attention_of(g, { n, n_seen });
            };
        }
    }
    for (const auto & [n, n_seen] : {
             std::pair{ 1, 64 },
             { 1, 32 },
             { 2, 32 }
    }) {
        b["shorter-softmax-" + std::to_string(n) + "x" + std::to_string(n_seen)] = [n = n, n_seen = n_seen](graph & g) {
            scores_of(g, { n, n_seen });
        };
    }
    b["shorter-softmax-unmasked"] = [](graph & g) {
        scores_of(g, unmasked(1, 64));
    };
    b["shorter-tied"] = [](graph & g) {
        norm_options o = one_tensor(false);
        o.n            = 3;
        square(g, o);
    };
    b["shorter-unmasked"] = [](graph & g) {
        attention_of(g, unmasked(1, 64));
    };
    b["shorter-reading"] = [](graph & g) {
        attention_of(g, reading(40, 80));
    };
    // and those that no such kernel computes
    const std::map<std::string, builder> refused = {
        { "in-place",         [](graph & g) { in_place_of(g, 3); }                }, // would write beyond
        { "scores",           [](graph & g) { cache_of(g, 3, 7); }                }, // a result of other columns
        { "columns",          [](graph & g) { views_of(g, 2); }                   }, // the same, transposed
        { "unmasked-scores",  [](graph & g) { scores_of(g, unmasked(2, 32)); }    }, // likewise
        { "unmasked-cells",   [](graph & g) { attention_of(g, unmasked(2, 32)); } }, // nothing hides what is beyond
        { "cache-of-its-own", [](graph & g) { attention_of(g, { 2, 32, 80 }); }   }, // it writes to another cache
        { "end-of-cache",     [](graph & g) { attention_of(g, reading(40, 48)); } }, // which goes on nowhere
    };
    for (const auto & r : refused) {
        const int norms         = r.first == "end-of-cache";  // groups of its first nodes
        b["refused-" + r.first] = [build = r.second, norms](graph & g) {
            build(g);
            g.groups.clear();
            g.launches = norms;
        };
    }
}

//
// groups of more tokens than there are kernels for
//

// A token's row goes through all of it, but where a row of all is taken, or a sum made of them.
static void mixed_of(graph & g, int64_t n, const std::string & how) {
    ggml_tensor * x = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), x, 1e-5f));
    ggml_tensor * u;
    if (how == "rows") {
        u = ggml_get_rows(g.get(), t, g.input(GGML_TYPE_I32, n));
    } else if (how == "row") {
        u = ggml_mul(g.get(), t, ggml_view_1d(g.get(), t, 64, 0));
    } else if (how == "sum") {
        ggml_tensor * columns = g.add(ggml_cont(g.get(), ggml_transpose(g.get(), t)));
        u                     = ggml_mul_mat(g.get(), columns, columns);
    } else if (how == "state") {
        ggml_tensor * state = g.input(GGML_TYPE_F32, 64);
        g.add(ggml_scale_inplace(g.get(), state, 0.5f));
        g.written = { state };
        u         = ggml_mul(g.get(), t, state);
    } else {
        u = ggml_sqr(g.get(), t);
    }
    g.end(g.add(ggml_silu(g.get(), g.add(u))), 0, { how == "sum" || how == "state" ? 4 : 3 });
}

static attention_options causal(int64_t n, int64_t n_seen) {
    attention_options o{ n, n_seen };
    o.causal = true;
    return o;
}

// What is launched in pieces, with how many launches, and what is not.
static void pieces(std::map<std::string, builder> & b) {
    const auto add = [&b](const std::string & name, int n_launches, const builder & build) {
        b["pieces-" + name] = [n_launches, build](graph & g) {
            build(g);
            g.launches = n_launches;
        };
    };
    for (const char * how : { "plain", "rows", "row", "sum", "state" }) {
        b[std::string("mixed-") + how] = [how](graph & g) {
            mixed_of(g, 4, how);
        };
        // as 4 and 4 and, of which the first are computed twice, 4 more
        add(std::string("mixed-") + how, how == std::string("plain") ? 3 : 0,
            [how](graph & g) { mixed_of(g, 9, how); });
    }
    add("twice", 6, [](graph & g) { twice_of(g, 9); });
    add("twice-8", 4, [](graph & g) { twice_of(g, 8); });
    add("several-results", 2, [](graph & g) { several_results_of(g, 7); });
    for (const int64_t n_seen : { 32, 64 }) {
        const std::string cells = "x" + std::to_string(n_seen);
        add("attention-5" + cells, 3, [n_seen](graph & g) { attention_of(g, causal(5, n_seen)); });
        add("softmax-6" + cells, 3, [n_seen](graph & g) { scores_of(g, causal(6, n_seen)); });
        // earlier tokens see what later ones write
        add("open-attention-5" + cells, 0, [n_seen](graph & g) { attention_of(g, { 5, n_seen }); });
        add("open-softmax-6" + cells, 0, [n_seen](graph & g) { scores_of(g, { 6, n_seen }); });
    }
    // its cache has cells that no node writes
    add("reading", 3, [](graph & g) {
        attention_options o = reading(40, 80);
        o.n                 = 5;
        attention_of(g, o);
    });
    add("unmasked", 0, [](graph & g) { attention_of(g, unmasked(5, 64)); });
    add("softmax-unmasked", 0, [](graph & g) { scores_of(g, unmasked(5, 64)); });
    add("computed-mask", 0, [](graph & g) {
        attention_options o = causal(5, 64);
        o.computed          = true;
        attention_of(g, o);
    });
    add("cache", 0, [](graph & g) { cache_of(g, 6, 8); });
    add("in-place", 0, [](graph & g) { in_place_of(g, 6); });
    add("columns", 0, [](graph & g) { views_of(g, 6); });
}

//
// what is not a group that there is a kernel for
//

static const std::map<std::string, norm_options> & mutations() {
    static const std::map<std::string, norm_options> all = [] {
        std::map<std::string, norm_options> m;
        m["shape"].n        = 65;  // more than pieces would be launched for
        m["type"].type      = GGML_TYPE_F32;
        m["parameters"].eps = 2e-5f;
        m["strides"].gaps   = true;
        m["order"].swapped  = true;
        m["op"].add         = true;
        m["wiring"].twice   = true;
        m["memory"].inplace = true;
        m["roots"].added    = true;
        return m;
    }();
    return all;
}

// Where an order of sources or a wiring is to matter all are of the same shape.
static void square(graph & g, const norm_options & o) {
    ggml_tensor * x = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * w = o.same ? x : g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), x, o.eps));
    t               = g.add(o.added     ? ggml_add(g.get(), t, w)
                            : o.swapped ? ggml_mul(g.get(), w, t)
                                        : ggml_mul(g.get(), t, o.twice ? t : w));
    g.end(product(g, t), 0, { 3 });
}

static void square_group(graph & g) {
    square(g, {});
}

// One tensor that is several slots of a kernel, or its parts are: where nothing is written to it, that is the same.
static norm_options one_tensor(bool shared) {
    norm_options o;
    o.same   = !shared;
    o.shared = shared;
    return o;
}

static void tied_wiring(graph & g) {
    square(g, one_tensor(false));
}

static void tied_roots(graph & g) {
    const norm_options o = one_tensor(true);
    g.end(product(g, norm(g, nullptr, o), o), 0, { 3 });
}

// One slot of a kernel, which is not the same as several tensors.
static void tied(graph & g) {
    norm_options o = one_tensor(false);
    o.added        = true;
    square(g, o);
}

static void mutated(graph & g, const norm_options & o) {
    if (o.swapped || o.twice || o.added) {
        square(g, o);
    } else {
        g.end(product(g, norm(g, nullptr, o), o), 0, {});
    }
    g.groups.clear();
    g.launches = 0;
}

// A slot that is written is also read as another one.
static void mutated_written(graph & g) {
    in_place_of(g, 4, true);
    g.groups.clear();
    g.launches = 0;
}

// The result in the middle is used after the group.
static void escapes(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    g.end(ggml_add(g.get(), product(g, t), t), 0, {});
}

// So is a part of it.
static void part_escapes(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    ggml_tensor * y = product(g, t);
    ggml_tensor * v = ggml_view_2d(g.get(), t, 64, 1, t->nb[1], t->nb[1]);
    g.end(ggml_add(g.get(), y, v), 0, {});
}

static void middle_is_output(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    ggml_set_output(t);
    g.end(product(g, t), 0, {});
}

// The graph ends within the group.
static void ends_early(graph & g) {
    g.end(norm(g, nullptr), 0, {});
}

//
// random graphs
//

static void random_graph(graph & g, unsigned seed) {
    std::mt19937 random(seed);
    const auto   below = [&](size_t n) {
        return (int) (random() % n);
    };
    std::vector<ggml_tensor *> rows;  // of 64 by 4
    for (int i = 0; i < 3; i++) {
        rows.push_back(g.input(GGML_TYPE_F32, 64, 4));
    }
    ggml_tensor * cells = g.input(GGML_TYPE_F16, 64, 12);
    ggml_tensor * index = g.input(GGML_TYPE_I64, 4);
    ggml_tensor * state = g.input(GGML_TYPE_F32, 64, 6);
    g.written           = { cells, state };
    const auto any      = [&] {
        ggml_tensor * t = rows[(size_t) below(rows.size())];
        return below(4) ? t : ggml_view_2d(g.get(), t, 64, 2, t->nb[1], (size_t) below(3) * t->nb[1]);
    };
    const auto full = [&] {
        return rows[rows.size() - 1 - (size_t) below(std::min<size_t>(rows.size(), 3))];
    };
    ggml_context * ctx = g.get();
    while ((int) g.work().size() < 14) {
        ggml_tensor * t = full();
        switch (below(13)) {
            case 0:
                t = ggml_add(ctx, t, full());
                break;
            case 1:
                t = ggml_mul(ctx, t, full());
                break;
            case 2:
                t = ggml_sub(ctx, t, any());
                break;
            case 3:
                t = ggml_rms_norm(ctx, t, 1e-5f);
                break;
            case 4:
                t = ggml_silu(ctx, t);
                break;
            case 5:
                t = ggml_scale(ctx, t, 0.5f);
                break;
            case 6:
                t = ggml_mul_mat(ctx, g.input(GGML_TYPE_F16, 64, 64), t);
                break;
            case 7:
                t = ggml_soft_max(ctx, t);
                break;
            case 8:
                t = ggml_mul_mat(ctx, ggml_view_2d(ctx, cells, 64, 4, cells->nb[1], (size_t) below(8) * cells->nb[1]),
                                 t);
                t = ggml_add(ctx, full(),
                             g.add(ggml_repeat(ctx, g.add(ggml_cont(ctx, ggml_transpose(ctx, t))), full())));
                break;
            case 9:
                g.add(ggml_set_rows(ctx, cells, t, index));
                continue;
            case 10:
                g.add(
                    ggml_cpy(ctx, t, ggml_view_2d(ctx, state, 64, 4, state->nb[1], (size_t) below(3) * state->nb[1])));
                continue;
            case 11:
                t = ggml_add(ctx, t, ggml_view_2d(ctx, state, 64, 4, state->nb[1], state->nb[1]));
                break;
            default:
                t = ggml_cont(ctx, ggml_transpose(ctx, ggml_reshape_2d(ctx, t, 16, 16)));
                t = ggml_reshape_2d(ctx, t, 64, 4);
                g.add(t);
                break;
        }
        rows.push_back(g.add(t));
        if (below(12) == 0) {
            ggml_set_output(rows.back());
        }
    }
    ggml_tensor * last = full();
    g.end(ggml_add(ctx, last, full()), 0, {});
    // two groups with a node between them
    const int n = (int) g.work().size();
    const int a = 2 + below(5);
    const int b = a + 1 + 2 + below(4);
    g.groups    = {
        { below(2), a },
        { a + 2, std::min(b, n - 1) }
    };
    g.launches = 2;
}

// What kernels for more tokens and cells compute right, or refuse: rows, attention of both kinds, and what mixes rows.
class lengths_graph {
  public:
    lengths_graph(graph & g, unsigned seed, int64_t n, int64_t n_seen) :
        g(g), random(seed), causal(seed % 4 != 3), n(n), n_seen(n_seen) {}

    void make() {
        for (int i = 0; i < 2; i++) {
            rows.push_back(g.input(GGML_TYPE_F32, 64, n));
        }
        k         = g.input(GGML_TYPE_F16, 64, 96);
        v         = g.input(GGML_TYPE_F16, 96, 64);
        state     = g.input(GGML_TYPE_F32, 64, 32);
        index     = g.input(GGML_TYPE_I64, n);
        mask      = g.input(GGML_TYPE_F16, n_seen, n);
        scores    = g.input(GGML_TYPE_F32, n_seen, n);
        g.written = { k, state };
        if (causal) {
            g.causal = { mask, scores };
        }
        while (g.work().size() < 14) {
            if (ggml_tensor * t = next()) {
                rows.push_back(g.add(t));
            }
        }
        g.end(ggml_add(ctx(), any(), any()), 0, {});
        const int end = (int) g.work().size() - 1;
        const int a   = 3 + below(5);
        g.groups      = {
            { below(3), a },
            { a + 2, std::min(a + 4 + below(5), end) }
        };
    }

  private:
    int below(size_t most) { return (int) (random() % most); }

    ggml_context * ctx() { return g.get(); }

    ggml_tensor * any() { return rows[rows.size() - 1 - (size_t) below(std::min<size_t>(rows.size(), 3))]; }

    ggml_tensor * weights(int64_t n_rows = 64) { return g.input(GGML_TYPE_F16, 64, n_rows); }

    ggml_tensor * transposed(ggml_tensor * t) { return g.add(ggml_cont(ctx(), ggml_transpose(ctx(), t))); }

    ggml_tensor * heads(ggml_tensor * t) {
        return ggml_permute(ctx(), ggml_reshape_3d(ctx(), t, 32, 2, n), 0, 2, 1, 3);
    }

    ggml_tensor * keys() { return ggml_view_3d(ctx(), k, 32, n_seen, 2, k->nb[1], k->nb[1] / 2, 0); }

    ggml_tensor * flash_attention() {
        ggml_tensor * t = ggml_flash_attn_ext(ctx(), heads(any()), keys(), keys(), mask, 0.1f, 0.0f, 0.0f);
        return ggml_add(ctx(), ggml_reshape_2d(ctx(), g.add(t), 64, n), any());
    }

    ggml_tensor * attention() {
        ggml_tensor * t      = g.add(ggml_mul_mat(ctx(), keys(), heads(any())));
        ggml_tensor * values = ggml_view_3d(ctx(), v, n_seen, 32, 2, v->nb[1], 32 * v->nb[1], 0);
        t                    = g.add(ggml_soft_max_ext(ctx(), t, below(4) ? scores : nullptr, 0.1f, 0.0f));
        t                    = g.add(ggml_mul_mat(ctx(), values, t));
        return ggml_cont_2d(ctx(), ggml_permute(ctx(), t, 0, 2, 1, 3), 64, n);
    }

    // A product that sums over the tokens, multiplied.
    ggml_tensor * mixed(ggml_tensor * t) {
        return ggml_mul_mat(ctx(), g.add(ggml_mul_mat(ctx(), transposed(t), transposed(any()))), any());
    }

    // Returns a row of a result, or a part of what is written, for all tokens.
    ggml_tensor * row() {
        return below(2) ? ggml_view_2d(ctx(), any(), 64, 1, 256, (size_t) below((size_t) n) * 256)
                        : ggml_view_2d(ctx(), state, 64, 1, 256, (size_t) below(9) * 256);
    }

    // Returns the next result, or NULL when something was written.
    ggml_tensor * next() {
        ggml_tensor * t = any();
        switch (below(15)) {
            case 0:
                return ggml_add(ctx(), t, any());
            case 1:
                return ggml_mul(ctx(), t, any());
            case 2:
                return ggml_mul(ctx(), t, g.input(GGML_TYPE_F32, 64));
            case 3:
                return ggml_rms_norm(ctx(), t, 1e-5f);
            case 4:
                return ggml_silu(ctx(), t);
            case 5:
                return ggml_scale(ctx(), t, 0.5f);
            case 6:
            case 7:
                return ggml_mul_mat(ctx(), weights(), t);
            case 8:
                return ggml_soft_max(ctx(), t);
            case 9:
                return ggml_swiglu_split(ctx(), t, any());
            case 10:
                // as layers do, with numbers that F16 has
                g.add(ggml_set_rows(ctx(), k, g.add(ggml_rms_norm(ctx(), t, 1e-5f)), index));
                return below(4) ? flash_attention() : nullptr;
            case 11:
                return flash_attention();
            case 12:
                return attention();
            case 13:
                return below(3) ? ggml_sub(ctx(), t, row()) : mixed(t);
            default:
                if (below(2)) {
                    return transposed(g.add(ggml_scale(ctx(), transposed(t), 2.0f)));
                }
                g.add(ggml_cpy(ctx(), t, ggml_view_2d(ctx(), state, 64, n, state->nb[1], state->nb[1])));
                return nullptr;
        }
    }

    graph &                    g;
    std::mt19937               random;
    const bool                 causal;  // the masks
    const int64_t              n;
    const int64_t              n_seen;
    std::vector<ggml_tensor *> rows;  // of 64 by n
    ggml_tensor *              k;
    ggml_tensor *              v;
    ggml_tensor *              state;
    ggml_tensor *              index;
    ggml_tensor *              mask;
    ggml_tensor *              scores;
};

//
// as a manifest
//

class manifest {
  public:
    std::string text() const {
        return "format: 1\nname: groups\ntargets: [trn1]\nkernels:\n" + kernels + "graphs:\n" + graphs;
    }

    void add(const graph & g, const std::string & name) {
        const auto work = g.work();
        for (ggml_tensor * node : work) {
            add_kernel(node);
        }
        for (size_t i = 0; i < g.groups.size(); i++) {
            add_group(g, work, g.groups[i], name + "_" + std::to_string(i));
        }
    }

  private:
    std::string           kernels;
    std::string           graphs;
    std::set<std::string> known;

    static std::string tensor(const ggml_tensor * t) {
        std::ostringstream out;
        out << "(" << t->ne[0] << "," << t->ne[1] << "," << t->ne[2] << "," << t->ne[3] << ")/"
            << ggml_type_name(t->type);
        if (!ggml_is_contiguous(t)) {
            out << "/(" << t->nb[0] << "," << t->nb[1] << "," << t->nb[2] << "," << t->nb[3] << ")";
        }
        return out.str();
    }

    static std::string op(const ggml_tensor * t) {
        std::string name = ggml_op_desc(t);
        std::transform(name.begin(), name.end(), name.begin(), [](char c) { return (char) std::tolower(c); });
        return name;
    }

    // Of the ops that there are here.
    static std::string params(const ggml_tensor * t) {
        char  text[64] = "";
        float f[2];
        memcpy(f, t->op_params, sizeof(f));
        if (t->op == GGML_OP_RMS_NORM) {
            snprintf(text, sizeof(text), ", params: {eps: %.9g}", f[0]);
        } else if (t->op == GGML_OP_SCALE) {
            snprintf(text, sizeof(text), ", params: {s: %.9g, b: %.9g}", f[0], f[1]);
        } else if (t->op == GGML_OP_SOFT_MAX || t->op == GGML_OP_FLASH_ATTN_EXT) {
            snprintf(text, sizeof(text), ", params: {scale: %.9g, max_bias: %.9g}", f[0], f[1]);
        }
        return text;
    }

    void add_kernel(const ggml_tensor * node) {
        std::string line = "  - {op: " + op(node) + ", inputs: [";
        for (int i = 0; i < neuron_n_src(node); i++) {
            line += (i ? ", \"" : "\"") + tensor(node->src[i]) + "\"";
        }
        line += "], output: \"" + tensor(node) + "\"" + params(node);
        const int alias = neuron_alias_of(node);
        if (alias != NEURON_KERNELS_NO_ALIAS && node->op != GGML_OP_SET_ROWS && node->op != GGML_OP_CPY) {
            line += ", alias: " + std::to_string(alias);
        }
        if (known.insert(line).second) {
            kernels += line + "}\n";
        }
    }

    void add_group(const graph &                      g,
                   const std::vector<ggml_tensor *> & work,
                   std::pair<int, int>                range,
                   const std::string &                name) {
        std::map<const ggml_tensor *, std::string> names;  // of roots
        std::string                                inputs;
        std::string                                nodes;
        std::string                                outputs;
        const auto                                 reference = [&](const ggml_tensor * t) {
            const ggml_tensor * root = t->view_src ? t->view_src : t;
            auto                it   = names.find(root);
            if (it == names.end()) {
                it = names.emplace(root, "s" + std::to_string(names.size())).first;
                inputs += "      " + it->second + ": \"" + tensor(root) + "\"\n";
            }
            return it->second + "+" + std::to_string(t->view_src ? t->view_offs : 0) + " " + tensor(t);
        };
        for (int i = range.first; i <= range.second; i++) {
            ggml_tensor * node = work[(size_t) i];
            std::string   from;
            for (int s = 0; s < neuron_n_src(node); s++) {
                from += (s ? ", \"" : "\"") + reference(node->src[s]) + "\"";
            }
            const std::string own = "n" + std::to_string(i);
            const std::string to  = node->view_src ? reference(node) : tensor(node);
            nodes += "      - {name: " + own + ", op: " + op(node) + ", inputs: [" + from + "], output: \"" + to +
                     "\"" + params(node) + "}\n";
            if (!node->view_src) {
                names[node] = own;
                if (is_seen(g, work, range, node)) {
                    outputs += (outputs.empty() ? "" : ", ") + own;
                }
            }
        }
        const std::string body = "    inputs:\n" + inputs + "    nodes:\n" + nodes + "    outputs: [" + outputs + "]\n";
        if (known.insert(body).second) {
            graphs += "  - name: " + name + "\n" + body;
        }
    }

    // Returns whether a node's result is used by others than the group's, or is an output.
    static bool is_seen(const graph &                      g,
                        const std::vector<ggml_tensor *> & work,
                        std::pair<int, int>                range,
                        const ggml_tensor *                node) {
        bool used = false;
        for (int i = 0; i < (int) work.size(); i++) {
            for (const ggml_tensor * src : work[(size_t) i]->src) {
                const bool of = src && (src == node || src->view_src == node);
                used          = used || of;
                if (of && (i < range.first || i > range.second)) {
                    return true;
                }
            }
            if (work[(size_t) i]->view_src == node && (i < range.first || i > range.second)) {
                return true;
            }
        }
        return !used || (node->flags & GGML_TENSOR_FLAG_OUTPUT);
        GGML_UNUSED(g);
    }
};

//
// computing
//

static ggml_backend_reg_t neurons;
static ggml_backend_dev_t neuron;
static ggml_backend_dev_t cpu;

// llama.cpp's test-fusion asks for these by name.
static void enable(bool groups) {
    const auto get =
        (void * (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_get");
    const auto set =
        (void (*)(void *, bool)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_set_enabled");
    set(get(neuron), groups);
}

static int launches() {
    const auto get =
        (void * (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_get");
    const auto all = (int (*)(void *, const char **, uint64_t *, int)) ggml_backend_reg_get_proc_address(
        neurons, "ggml_backend_fusion_stats_get");
    const auto zero = (void (*)(void *)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_stats_reset");
    std::vector<uint64_t> counts((size_t) all(get(neuron), nullptr, nullptr, 0));
    all(get(neuron), nullptr, counts.data(), (int) counts.size());
    zero(get(neuron));
    int n = 0;
    for (const uint64_t count : counts) {
        n += (int) count;
    }
    return n;
}

static void fill(ggml_tensor * t, float seed) {
    const auto         n = (size_t) ggml_nelements(t);
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) {
        values[i] = std::sin(seed + (float) i * 0.7f);
    }
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> halves(n);
        ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) n);
        ggml_backend_tensor_set(t, halves.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_I32) {
        std::vector<int32_t> rows(n);  // backwards
        for (size_t i = 0; i < n; i++) {
            rows[i] = (int32_t) (n - 1 - i);
        }
        ggml_backend_tensor_set(t, rows.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<int64_t> rows(n);
        for (size_t i = 0; i < n; i++) {
            rows[i] = (int64_t) (2 * i + 1);
        }
        ggml_backend_tensor_set(t, rows.data(), 0, ggml_nbytes(t));
    }
}

static double nmse(const std::vector<float> & got, const std::vector<float> & wanted) {
    double error = 0;
    double size  = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        error += std::pow((double) got[i] - (double) wanted[i], 2.0);
        size += std::pow((double) wanted[i], 2.0);
    }
    return got.size() != wanted.size() || std::isnan(error) ? INFINITY : size > 0 ? error / size : error;
}

// What a graph leaves behind: outputs, in the order of the nodes, and the inputs that it changes.
using outcome = std::vector<std::vector<float>>;

static outcome read_all(const graph & g) {
    outcome out;
    for (const ggml_tensor * node : g.work()) {
        if (node->flags & GGML_TENSOR_FLAG_OUTPUT) {
            out.push_back(read(node));
        }
    }
    for (const ggml_tensor * t : g.written) {
        if (t->buffer) {
            out.push_back(read(t));
        }
    }
    return out;
}

// Hides what later tokens write in the cells that `fill` gives them: token t writes cell 2 t + 1.
static void hide_later(ggml_tensor * mask) {
    std::vector<float> values = read(mask);
    for (int64_t t = 0; t < mask->ne[1]; t++) {
        for (int64_t cell = 2 * t + 3; cell < mask->ne[0]; cell += 2) {
            values[(size_t) (t * mask->ne[0] + cell)] = -INFINITY;
        }
    }
    std::vector<ggml_fp16_t> halves(values.size());
    ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) values.size());
    const bool half = mask->type == GGML_TYPE_F16;
    ggml_backend_tensor_set(mask, half ? (const void *) halves.data() : values.data(), 0, ggml_nbytes(mask));
}

static void fill_all(const graph & g, bool causal = true) {
    float seed = 1;
    for (ggml_tensor * t : g.inputs) {
        if (t->buffer) {  // a random graph may not use it
            fill(t, seed);
        }
        seed++;
    }
    for (ggml_tensor * mask : g.causal) {
        if (causal && mask->buffer) {
            hide_later(mask);
        }
    }
    if (g.places) {
        std::vector<int64_t> places((size_t) g.places->ne[0]);
        for (size_t i = 0; i < places.size(); i++) {
            places[i] = (int64_t) (i % 64) * g.n_cell + 2 * (int64_t) (i / 64) + 1;
        }
        ggml_backend_tensor_set(g.places, places.data(), 0, ggml_nbytes(g.places));
    }
}

enum class memory { OWN, REUSED };

// Computes a graph three times, the last time under the number of the one before.
static outcome compute(ggml_backend_dev_t dev, const builder & build, memory how) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    graph            g;
    build(g);
    ggml_backend_buffer_ptr buffer;
    ggml_gallocr_ptr        allocator;
    if (how == memory::OWN) {
        buffer.reset(ggml_backend_alloc_ctx_tensors(g.get(), backend.get()));
        check(buffer != nullptr, "no memory");
    } else {
        allocator.reset(ggml_gallocr_new(ggml_backend_dev_buffer_type(dev)));
        check(ggml_gallocr_alloc_graph(allocator.get(), g.cgraph), "no memory");
    }
    for (const uint64_t uid : { 0, 7, 7 }) {
        g.cgraph->uid = uid;
        fill_all(g);
        check(ggml_backend_graph_compute(backend.get(), g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    }
    return read_all(g);
}

// What a program that looks at nodes sees of them.
struct watcher {
    std::string wanted;  // which nodes: "all", or an op's name; of it also what it reads
    outcome     seen;
};

static bool watch(ggml_tensor * t, bool ask, void * data) {
    auto *     w      = (watcher *) data;
    const bool wanted = w->wanted == "all" || w->wanted == ggml_op_name(t->op);
    if (!ask && wanted && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t)) {
        w->seen.push_back(read(t));
        // other ops' results may take a source's memory
        for (const ggml_tensor * src : t->src) {
            if (t->op == GGML_OP_MUL_MAT && w->wanted != "all" && src && src->type == GGML_TYPE_F32 &&
                ggml_is_contiguous(src)) {
                w->seen.push_back(read(src));
            }
        }
    }
    return ask ? wanted : true;
}

// Computes a graph that ggml's scheduler gives memory.
static outcome compute_scheduled(const std::vector<ggml_backend_dev_t> & devices,
                                 const builder &                         build,
                                 watcher *                               w = nullptr) {
    std::vector<ggml_backend_ptr> owners;
    std::vector<ggml_backend_t>   backends;
    for (ggml_backend_dev_t dev : devices) {
        owners.emplace_back(ggml_backend_dev_init(dev, nullptr));
        backends.push_back(owners.back().get());
    }
    ggml_backend_sched_ptr scheduler(
        ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
    if (w) {
        ggml_backend_sched_set_eval_callback(scheduler.get(), watch, w);
    }
    graph g;
    build(g);
    for (ggml_tensor * t : g.inputs) {
        ggml_backend_sched_set_tensor_backend(scheduler.get(), t, backends.front());
    }
    check(ggml_backend_sched_alloc_graph(scheduler.get(), g.cgraph), "no memory");
    for (int i = 0; i < 2; i++) {
        fill_all(g);
        if (w) {
            w->seen.clear();
        }
        check(ggml_backend_sched_graph_compute(scheduler.get(), g.cgraph) == GGML_STATUS_SUCCESS,
              "graph_compute failed");
    }
    return read_all(g);
}

static void compare(const outcome & got, const outcome & wanted, double limit, const std::string & what) {
    check(got.size() == wanted.size(), what + ": " + std::to_string(got.size()) + " results");
    for (size_t i = 0; i < got.size(); i++) {
        const double error = nmse(got[i], wanted[i]);
        check(error <= limit, what + ": result " + std::to_string(i) + " has error " + std::to_string(error));
    }
}

// Computes with groups, without, and by the CPU; `times` is how often groups are launched for each computation.
constexpr int ANY = -1;  // number of launches

static void against(const std::function<outcome(bool)> & compute, int expected, int times, double limit = 1e-6) {
    const outcome wanted = compute(false);
    launches();
    enable(true);
    const outcome fused = ::launches() == 0 ? compute(true) : outcome{};
    const int     n     = launches();
    enable(false);
    const outcome unfused = compute(true);
    check(launches() == 0, "groups were launched that are turned off");
    enable(true);
    check(expected == ANY || n == expected * times,
          std::to_string(n) + " groups were launched, not " + std::to_string(expected * times));
    compare(fused, unfused, limit, "with groups and without");
    compare(fused, wanted, 1e-4, "by the CPU");
}

static int expected_launches(const builder & build) {
    graph g;
    build(g);
    return g.launches;
}

static void run_own(const builder & build, int expected) {
    against([&](bool here) { return compute(here ? neuron : cpu, build, memory::OWN); }, expected, 3);
}

static void run_reused(const builder & build) {
    against([&](bool here) { return compute(here ? neuron : cpu, build, memory::REUSED); }, expected_launches(build),
            3);
}

static void run_scheduled(const builder & build, double limit = 1e-6) {
    const std::vector<ggml_backend_dev_t> alone{ cpu };
    const std::vector<ggml_backend_dev_t> both{ neuron, cpu };
    against([&](bool here) { return compute_scheduled(here ? both : alone, build); }, expected_launches(build), 2,
            limit);
}

// A program looks at nodes, and at what they read: what it sees is what it sees without groups.
static void run_watched(const builder & build, const std::string & wanted, int expected) {
    const std::vector<ggml_backend_dev_t> alone{ cpu };
    const std::vector<ggml_backend_dev_t> both{ neuron, cpu };
    against(
        [&](bool here) {
            watcher w{ wanted, {} };
            outcome out = compute_scheduled(here ? both : alone, build, &w);
            check(!w.seen.empty(), "nothing was seen");
            out.insert(out.end(), w.seen.begin(), w.seen.end());
            return out;
        },
        expected, 2);
}

// The mask of a graph, which is computed again under its number, is causal or not.
static void run_changing(const builder & build, int expected) {
    const auto compute = [&build](ggml_backend_dev_t dev, std::vector<int> * counts) {
        ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        graph            g;
        build(g);
        ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(g.get(), backend.get()));
        g.cgraph->uid = 7;
        outcome all;
        for (const bool causal : { true, false, true, true, false, false, true }) {
            fill_all(g, causal);
            check(ggml_backend_graph_compute(backend.get(), g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
            const outcome one = read_all(g);
            all.insert(all.end(), one.begin(), one.end());
            if (counts) {
                counts->push_back(launches());
            }
        }
        return all;
    };
    launches();
    std::vector<int> counts;
    compare(compute(neuron, &counts), compute(cpu, nullptr), 1e-4, "by the CPU");
    check(counts == std::vector<int>{ expected, 0, expected, expected, 0, 0, expected }, "other launches");
}

// Threads compute a graph, each with a backend of its own, while groups are turned off and on.
static void run_threads(const builder & build) {
    const outcome                   wanted = compute(cpu, build, memory::OWN);
    std::vector<std::exception_ptr> errors(3);
    std::vector<std::thread>        threads;
    launches();
    for (std::exception_ptr & error : errors) {
        threads.emplace_back([&wanted, &build, &error] {
            try {
                for (int i = 0; i < 3; i++) {
                    compare(compute(neuron, build, memory::OWN), wanted, 1e-4, "in a thread");
                    enable(i != 0);
                }
            } catch (...) {
                error = std::current_exception();
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    enable(true);
    for (const std::exception_ptr & error : errors) {
        if (error) {
            std::rethrow_exception(error);
        }
    }
    check(launches() > 0, "no group was launched");
}

static const std::map<std::string, builder> & builders() {
    static const std::map<std::string, builder> all = [] {
        std::map<std::string, builder> b = {
            { "hit",              hit                                                 },
            { "twice",            twice                                               },
            { "between",          between                                             },
            { "cache",            cache                                               },
            { "attention",        attention                                           },
            { "softmax",          [](graph & g) { scores_of(g, {}); }                 },
            { "softmax-unmasked", [](graph & g) { scores_of(g, unmasked(2, 64)); }    },
            { "unmasked",         [](graph & g) { attention_of(g, unmasked(2, 64)); } },
            { "reading",          [](graph & g) { attention_of(g, reading(64, 96)); } },
            { "in-place",         in_place                                            },
            { "views",            views                                               },
            { "several-results",  several_results                                     },
            { "kept",             kept                                                },
            { "square",           square_group                                        },
            { "tied",             tied                                                },
            { "tied-wiring",      tied_wiring                                         },
            { "tied-roots",       tied_roots                                          },
            { "mutated-written",  mutated_written                                     },
            { "escapes",          escapes                                             },
            { "part-escapes",     part_escapes                                        },
            { "middle-is-output", middle_is_output                                    },
            { "ends-early",       ends_early                                          },
        };
        shorter(b);
        pieces(b);
        for (const auto & m : mutations()) {
            b["mutated-" + m.first] = [&m](graph & g) {
                mutated(g, m.second);
            };
        }
        for (unsigned i = 0; i < 1000; i++) {
            b["random-" + std::to_string(i)] = [i](graph & g) {
                random_graph(g, i);
            };
        }
        return b;
    }();
    return all;
}

// Returns what makes a graph: `lengths-<seed>`, or `lengths-<seed>-<tokens>x<cells>`, is a random one of these lengths.
static builder find_builder(const std::string & name) {
    unsigned seed;
    int64_t  n      = 6;
    int64_t  n_seen = 64;
    if (sscanf(name.c_str(), "lengths-%u-%" SCNd64 "x%" SCNd64, &seed, &n, &n_seen) < 1) {
        return builders().at(name);
    }
    return [seed, n, n_seen](graph & g) {
        lengths_graph(g, seed, n, n_seen).make();
        g.launches = ANY;
    };
}

static void run(const std::string & name) {
    const std::map<std::string, std::function<void()>> special = {
        { "watched",           [] { run_watched(twice, "all", 0); }     },
        // A group that ends where the program looks is not computed as one: the product's source is looked at, too.
        { "watched-products",  [] { run_watched(twice, "MUL_MAT", 0); } },
        // The second group ends where the scheduler ends the piece, and the backend can't tell whether the program looks there.
        { "watched-elsewhere", [] { run_watched(between, "UNARY", 1); } },
    };
    const auto found = special.find(name);
    if (found != special.end()) {
        found->second();
        return;
    }
    const size_t      colon = name.find(':');
    const std::string how   = colon == std::string::npos ? "" : name.substr(0, colon);
    const builder     build = find_builder(colon == std::string::npos ? name : name.substr(colon + 1));
    if (how == "scheduled") {
        run_scheduled(build);
    } else if (how == "alone") {
        run_scheduled(build, 1e-4);
    } else if (how == "off") {
        const outcome got = compute(neuron, build, memory::OWN);
        check(launches() == 0, "groups were launched that are turned off");
        compare(got, compute(cpu, build, memory::OWN), 1e-4, "by the CPU");
    } else if (how == "threads") {
        run_threads(build);
    } else if (how == "changing") {
        run_changing(build, expected_launches(build));
    } else if (how == "reused") {
        run_reused(build);
    } else {
        run_own(build, how == "apart" ? 0 : expected_launches(build));
    }
}

//
// words
//

// Reads a group and prints its words. A group is a line of numbers and names: how many nodes, and for each its op, whether it is
// seen outside, its 16 parameters, how many inputs it has, these, and its result. A tensor is a reference, an offset, type, ne and
// nb: a reference is `s<i>`, `n<i>` or, of a result in memory of its own, `own`; an input that is absent is `-`.
static void print_words(const std::string & line) {
    std::istringstream in(line);
    graph              g;
    neuron_group       group;
    size_t             n_nodes;
    in >> n_nodes;
    std::map<std::string, ggml_tensor *>           roots;
    std::vector<ggml_tensor *>                     nodes(n_nodes);
    std::map<std::string, std::pair<ggml_op, int>> ops;
    for (int op = 0; op < GGML_OP_COUNT; op++) {
        ops[ggml_op_name((ggml_op) op)] = { (ggml_op) op, -1 };
    }
    for (int op = 0; op < GGML_UNARY_OP_COUNT; op++) {
        ops[ggml_unary_op_name((ggml_unary_op) op)] = { GGML_OP_UNARY, op };
    }
    for (size_t i = 0; i < n_nodes; i++) {
        nodes[i] = ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1);
    }
    const auto read_tensor = [&](const std::string & name, ggml_tensor * t, size_t at) {
        size_t offset;
        int    type;
        in >> offset >> type;
        t->type = (ggml_type) type;
        for (int64_t & ne : t->ne) {
            in >> ne;
        }
        for (size_t & nb : t->nb) {
            in >> nb;
        }
        if (name == "own") {
            return;
        }
        ggml_tensor * root = nullptr;
        if (name[0] == 'n') {
            root = nodes[std::stoul(name.substr(1))];
        } else {
            ggml_tensor *& slot = roots[name];
            slot                = slot ? slot : ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1 << 20);
            root                = slot;
            offset += 4096 * (std::stoul(name.substr(1)) + 1);  // that its use does not begin with it must not matter
        }
        t->view_src  = root;
        t->view_offs = offset;
        t->src[at]   = root;
    };
    for (size_t i = 0; i < n_nodes; i++) {
        std::string op, name;
        bool        seen;
        int         n_inputs;
        in >> op >> seen;
        std::transform(op.begin(), op.end(), op.begin(), [](char c) { return (char) std::toupper(c); });
        ggml_tensor * node = nodes[i];
        check(ops.count(op) != 0, "no op " + op);
        node->op = ops[op].first;
        ggml_set_name(node, ("node" + std::to_string(i)).c_str());
        for (int32_t & param : node->op_params) {
            in >> param;
        }
        in >> n_inputs;
        for (int s = 0; s < n_inputs; s++) {
            in >> name;
            if (name == "-") {
                continue;
            }
            if (name == "n" + std::to_string(i)) {  // ggml_cast
                ggml_tensor ignored{};
                read_tensor("own", &ignored, 0);
                node->src[s] = node;
                continue;
            }
            ggml_tensor * view = ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1);
            read_tensor(name, view, 0);
            view->op     = GGML_OP_VIEW;
            node->src[s] = view;
        }
        in >> name;
        ggml_tensor * own = node;
        ggml_tensor   result{};
        read_tensor(name, &result, 0);
        own->type = result.type;
        std::copy(result.ne, result.ne + 4, own->ne);
        std::copy(result.nb, result.nb + 4, own->nb);
        own->view_src  = result.view_src;
        own->view_offs = result.view_offs;
        check(!in.fail(), "not a group: " + line);
        g.add(node);
        if (seen) {
            ggml_set_output(node);
        }
    }
    for (int i = 0; i < g.cgraph->n_nodes; i++) {
        if (!neuron_is_view_op(g.cgraph->nodes[i]->op)) {
            group.nodes.push_back(i);
        }
    }
    const char * separator = "";
    for (const uint64_t word : neuron_group_words(g.cgraph, false, group)) {
        printf("%s%016" PRIx64, separator, word);
        separator = " ";
    }
    printf("\n");
}

int main(int argc, char ** argv) {
    const std::string command = argc > 1 ? argv[1] : "";
    if (command == "words" && argc == 2) {
        for (std::string line; std::getline(std::cin, line);) {
            print_words(line);
        }
        return 0;
    }
    if (command == "manifest") {
        manifest out;
        for (int i = 2; i < argc; i++) {
            graph g;
            find_builder(argv[i])(g);
            std::string name = argv[i];
            std::replace(name.begin(), name.end(), '-', '_');
            out.add(g, name);
        }
        fputs(out.text().c_str(), stdout);
        return 0;
    }
    if (command != "run" || argc < 5) {
        fprintf(stderr, "usage: groups words | manifest <scenario>... | run <libggml-neuron.so> <folder with ggml's "
                        "CPU backend> <scenario>...\n");
        return 2;
    }
    ggml_backend_load_all_from_path(argv[3]);
    cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    neurons = ggml_backend_load(argv[2]);
    if (!neurons || !cpu || ggml_backend_reg_dev_count(neurons) == 0) {
        fprintf(stderr, "groups: a backend does not load, or has no devices\n");
        return 2;
    }
    neuron     = ggml_backend_reg_dev_get(neurons, 0);
    int result = 0;
    for (int i = 4; i < argc; i++) {
        try {
            run(argv[i]);
            printf("%s: ok\n", argv[i]);
        } catch (const std::exception & error) {
            printf("%s: %s\n", argv[i], error.what());
            result = 1;
        }
        fflush(stdout);
    }
    return result;
}
