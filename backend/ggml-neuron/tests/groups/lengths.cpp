// Groups with other numbers of tokens, or with a shorter cache, than the kernels have.

#include "ggml.h"
#include "graph.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

void shorter(std::map<std::string, builder> & b) {
    b["shorter-twice"] = [](graph & g) {
        twice_of(g, 3);
    };
    b["shorter-twice-1"] = [](graph & g) {
        twice_of(g, 1);
    };
    b["shorter-several-results"] = [](graph & g) {
        several_results_of(g, 1);
    };
    // padding rows repeat the group's writes, and write nothing else
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
    // Groups that no such kernel computes.
    const std::map<std::string, builder> refused = {
        { "in-place",         [](graph & g) { in_place_of(g, 3); }                }, // it would write beyond
        { "scores",           [](graph & g) { cache_of(g, 3, 7); }                }, // a result of other columns
        { "columns",          [](graph & g) { views_of(g, 2); }                   }, // also, transposed
        { "unmasked-scores",  [](graph & g) { scores_of(g, unmasked(2, 32)); }    }, // also
        { "unmasked-cells",   [](graph & g) { attention_of(g, unmasked(2, 32)); } }, // nothing hides the cells beyond
        { "cache-of-its-own", [](graph & g) { attention_of(g, { 2, 32, 80 }); }   }, // it writes to another cache
        { "end-of-cache",     [](graph & g) { attention_of(g, reading(40, 48)); } }, // no cells follow
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

// Each token's row passes through all nodes. Exceptions take a row of all tokens, or sum over tokens.
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

// Several rows per token, and then one row per token.
static void heads_of(graph & g, int64_t n_heads, int64_t n) {
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), g.input(GGML_TYPE_F32, 16, n_heads * n), 1e-5f));
    g.end(ggml_silu(g.get(), ggml_reshape_2d(g.get(), t, 16 * n_heads, n)), 0, { 2 });
}

attention_options causal(int64_t n, int64_t n_seen) {
    attention_options o{ n, n_seen };
    o.causal = true;
    return o;
}

void lengths_of_caches(std::map<std::string, builder> & b) {
    for (const int64_t n_cell : { 31, 40, 64, 80, 256 }) {
        const std::string of = "cells-" + std::to_string(n_cell);
        attention_options o  = { 2, std::min<int64_t>(n_cell, 64), n_cell };
        o.kept               = true;
        o.far                = n_cell - 10;  // beyond the rows that attention reads, for longer caches
        const auto add       = [&b](const std::string & name, int n_launches, const attention_options & options) {
            b[name] = [n_launches, options](graph & g) {
                attention_of(g, options);
                g.launches = n_launches;
            };
        };
        const bool has = 2 * n_cell >= 64;  // there is memory behind the cache for the kernels' 64 cells
        add(of, has, o);
        if (n_cell < 32) {
            continue;
        }
        o.n      = 1;
        o.n_seen = 32;
        add(of + "-1x32", 1, o);
        o.n      = 5;
        o.causal = true;
        add(of + "-5x32", 3, o);
    }
}

void hidden_cells(std::map<std::string, builder> & b) {
    const auto add = [&b](const std::string & name, int n_launches, int64_t n, int64_t before, bool computed = false) {
        b["hidden" + name] = [=](graph & g) {
            attention_options o = causal(n, 320);
            o.n_cell            = 640;
            o.before            = before;
            o.computed          = computed;
            attention_of(g, o);
            g.launches = n_launches;
        };
    };
    add("", 1, 160, 160);
    add("-all", 1, 160, 32);
    add("-fewer", 1, 140, 150);
    add("-pieces", 2, 300, 10);
    // The kernel leaves out cells from 288 on for the first 128 tokens; the last of them attends to cell 288.
    add("-seen", 0, 160, 161);
    add("-computed", 0, 160, 160, true);
}

void pieces(std::map<std::string, builder> & b) {
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
        // in pieces of 4, 4 and 4: some rows of the last piece are computed twice
        add(std::string("mixed-") + how, how == std::string("plain") ? 3 : 0,
            [how](graph & g) { mixed_of(g, 9, how); });
    }
    for (const int64_t n_heads : { 1, 3 }) {
        b["heads-" + std::to_string(n_heads)] = [n_heads](graph & g) {
            heads_of(g, n_heads, 1);
        };
    }
    // fewer heads must not count as fewer tokens
    add("heads-3", 2, [](graph & g) { heads_of(g, 3, 2); });
    add("twice", 6, [](graph & g) { twice_of(g, 9); });
    add("twice-8", 4, [](graph & g) { twice_of(g, 8); });
    add("several-results", 2, [](graph & g) { several_results_of(g, 7); });
    for (const int64_t n_seen : { 32, 64 }) {
        const std::string cells = "x" + std::to_string(n_seen);
        add("attention-5" + cells, 3, [n_seen](graph & g) { attention_of(g, causal(5, n_seen)); });
        add("softmax-6" + cells, 3, [n_seen](graph & g) { scores_of(g, causal(6, n_seen)); });
        // earlier tokens attend to cells that later tokens write
        add("open-attention-5" + cells, 0, [n_seen](graph & g) { attention_of(g, { 5, n_seen }); });
        add("open-softmax-6" + cells, 0, [n_seen](graph & g) { scores_of(g, { 6, n_seen }); });
    }
    // a cache with cells that no node writes
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
