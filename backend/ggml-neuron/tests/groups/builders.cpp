// All scenarios, by name.

#include "graph.h"
#include "random.h"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

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
            { "copied-mask",      copied_mask                                         },
        };
        shorter(b);
        lengths_of_caches(b);
        hidden_cells(b);
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

builder find_builder(const std::string & name) {
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
