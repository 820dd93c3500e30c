// Groups of nodes that one kernel computes: graphs with groups, as a manifest and as a computation.
//
//     groups words                                      reads groups, prints the words of their keys
//     groups manifest <scenario>...                     prints a manifest of the scenarios' groups
//     groups run <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...
//
// tests/ggml_neuron builds the manifest and then runs the scenarios. Each graph is computed with groups, without, and
// by the CPU. The output is one line per scenario, "<scenario>: ok" or "<scenario>: <the mistake>". `random-<n>` is one
// of many graphs of random ops. A prefix of a scenario selects how it is computed:
//
//     scheduled:   by ggml's scheduler
//     alone:       the same, with the CPU for nodes outside of groups
//     reused:      in memory that ggml's allocator reuses
//     apart:       groups are expected to be computed node by node
//     off:         with groups turned off by the variable
//     changing:    with a mask that is causal in some computations
//     written:     the same, with each way to write the mask
//     threads:     by several threads, while groups are turned off and on

#include "../values.h"
#include "computing.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "graph.h"
#include "manifest.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

static void run(const std::string & name) {
    const std::map<std::string, std::function<void()>> special = {
        { "watched",           [] { run_watched(twice, "all", 0); }     },
        // A group that ends at an examined node is computed node by node: the program also examines the product's
        // source.
        { "watched-products",  [] { run_watched(twice, "MUL_MAT", 0); } },
        // The second group ends where the scheduler ends the piece: the backend can't detect whether the program
        // examines that node.
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
    } else if (how == "written") {
        run_written(build, expected_launches(build));
    } else if (how == "reused") {
        run_reused(build);
    } else {
        run_own(build, how == "apart" ? 0 : expected_launches(build));
    }
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
