// Measures the time to find a kernel in a bundle, and compares it with a hash map of text keys, the obvious alternative.
//
//     lookup [--kernels=10000] [--max-ns=N] [--quick] [--json=FILE]
//
// Prints nanoseconds per lookup, for descriptions in the bundle and for others, in random order, as the best of several runs.
// It measures the map twice: with a text made from the description at each lookup, as a backend must for a graph node, and
// with a text that already exists.
//
// Fails when a hit in the bundle takes more than --max-ns, or when a lookup has a wrong result.

#include "backend/bundle/tests/pack_builder.h"
#include "neuron_kernels.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <random>
#include <unordered_map>

namespace {

constexpr size_t N_LOOKUPS = 1 << 16;
constexpr int    N_RUNS    = 7;
constexpr double MAX_NS    = 300;  // the limit in the written figures

// Returns n different kernels as models request them, with growing shapes, of each kind in turn. A bundle of kernels
// that are not `odd` has no `odd` kernel.
std::vector<test::kernel> make_kernels(size_t n, bool odd) {
    constexpr int32_t F32 = 0, F16 = 1, I64 = 27;

    const neuron_kernels_tensor absent = { NEURON_KERNELS_ABSENT, {}, {} };
    std::vector<test::kernel>   kernels;
    for (size_t i = 0; i < n; i++) {
        const int64_t m   = static_cast<int64_t>(i) * 2 + odd + 1;
        const auto    f32 = [](int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
            return test::dense(F32, ne0, ne1, ne2);
        };
        const auto f16 = [](int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
            return test::dense(F16, ne0, ne1, ne2);
        };
        test::kernel k;
        switch (i % 6) {
            case 0:
                k = {
                    "mul_mat", { f16(4096, 14336), f32(4096, m) },
                     f32(14336, m)
                };
                break;
            case 1:
                k = {
                    "add", { f32(4096, m), f32(4096, m) },
                     f32(4096, m)
                };
                break;
            case 2:
                k              = { "rms_norm", { f32(4096, m) }, f32(4096, m) };
                k.op_params[0] = 0x3727C5AC;
                break;
            case 3:
                k = {
                    "set_rows", { f32(1024, m), test::dense(I64, m), f16(1024, 4096) },
                     f16(1024, 4096), 2
                };
                break;
            case 4:
                k = {
                    "rope", { f32(128, 32, m), test::dense(26, m), absent },
                     f32(128, 32, m)
                };
                k.op_params[1] = 128;
                break;
            case 5:
                k = {
                    "flash_attn_ext",
                    { f32(128, m, 32), f16(128, 4096, 8), f16(128, 4096, 8), f16(4096, m) },
                    f32(128, 32, m)
                };
                k.op_params[0] = 0x3DB504F3;
                break;
        }
        kernels.push_back(k);
    }
    return kernels;
}

// Returns the key that a backend without this library would use.
std::string text_key(const test::kernel & k) {
    char        part[256];
    std::string text   = k.op;
    const auto  tensor = [&](const neuron_kernels_tensor & t) {
        if (t.type == NEURON_KERNELS_ABSENT) {
            text += "|-";
            return;
        }
        const int size = snprintf(part, sizeof(part),
                                  "|%d(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")(%" PRIu64 ",%" PRIu64
                                  ",%" PRIu64 ",%" PRIu64 ")",
                                  t.type, t.ne[0], t.ne[1], t.ne[2], t.ne[3], t.nb[0], t.nb[1], t.nb[2], t.nb[3]);
        text.append(part, static_cast<size_t>(size));
    };
    for (const neuron_kernels_tensor & t : k.inputs) {
        tensor(t);
    }
    tensor(k.output);
    for (const int32_t word : k.op_params) {
        const int size = snprintf(part, sizeof(part), "|%d", word);
        text.append(part, static_cast<size_t>(size));
    }
    return text;
}

// Returns the nanoseconds of the fastest run of `find` over `order`. All lookups must be hits if `hits` is true, else
// misses.
template <typename F> double measure(const std::vector<uint32_t> & order, bool hits, F find) {
    double best = 1e30;
    for (int run = 0; run < N_RUNS; run++) {
        size_t     found = 0;
        const auto start = std::chrono::steady_clock::now();
        for (const uint32_t i : order) {
            found += find(i) >= 0;
        }
        const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
        if (found != (hits ? order.size() : 0)) {
            fprintf(stderr, "%zu of %zu were found\n", found, order.size());
            exit(1);
        }
        best = std::min(best, time.count() / static_cast<double>(order.size()));
    }
    return best;
}

// Writes the figures in the format of benchmarks/figures.py.
bool write_json(const std::string & path,
                size_t              n,
                double              open_ms,
                double              hit,
                double              miss,
                double              text_hit,
                double              text_miss,
                double              max_ns) {
    FILE * file = fopen(path.c_str(), "w");
    if (!file) {
        perror(path.c_str());
        return false;
    }
    fprintf(
        file,
        "{\"figures\": [\n{\"what\": \"open and check a pack\", \"value\": %.17g, \"unit\": \"ms\", \"kernels\": %zu}",
        open_ms, n);
    const auto figure = [&](const char * what, double value, double peer, double limit) {
        fprintf(file,
                ",\n{\"what\": \"%s\", \"value\": %.17g, \"unit\": \"ns\", \"kernels\": %zu, \"ratio_is\": \"peer / "
                "value\","
                " \"peer\": {\"what\": \"a hash map of texts\", \"value\": %.17g}",
                what, value, n, peer);
        if (limit > 0) {
            fprintf(file, ", \"limit\": {\"of\": \"value\", \"at_most\": %.17g}", limit);
        }
        fprintf(file, "}");
    };
    figure("find a kernel", hit, text_hit, max_ns);
    figure("find that there is none", miss, text_miss, 0);
    fprintf(file, "\n]}\n");
    return fclose(file) == 0;
}

}  // namespace

int main(int argc, char ** argv) {
    size_t      n      = 10000;
    double      max_ns = 0;
    std::string json;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument.rfind("--kernels=", 0) == 0) {
            n = strtoull(argument.c_str() + 10, nullptr, 10);
        } else if (argument.rfind("--max-ns=", 0) == 0) {
            max_ns = strtod(argument.c_str() + 9, nullptr);
        } else if (argument.rfind("--json=", 0) == 0) {
            json = argument.substr(7);
        } else if (argument == "--quick") {
            n = 1000;
        } else {
            fprintf(stderr, "usage: %s [--kernels=N] [--max-ns=N] [--quick] [--json=FILE]\n", argv[0]);
            return 2;
        }
    }
    if (!json.empty() && max_ns == 0) {
        max_ns = MAX_NS;
    }
    const std::vector<test::kernel> kernels = make_kernels(n, false);
    const std::vector<test::kernel> others  = make_kernels(n, true);
    const std::string               bytes   = test::make_pack(kernels).bytes();

    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    const auto       start = std::chrono::steady_clock::now();
    if (neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, message, sizeof(message)) !=
        NEURON_KERNELS_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    const std::chrono::duration<double, std::milli> open_time = std::chrono::steady_clock::now() - start;

    std::unordered_map<std::string, int32_t> map;
    std::vector<std::string>                 texts, other_texts;
    for (size_t i = 0; i < n; i++) {
        texts.push_back(text_key(kernels[i]));
        other_texts.push_back(text_key(others[i]));
        map[texts.back()] = static_cast<int32_t>(i);
    }
    const auto find_text = [&](const std::string & text) {
        const auto found = map.find(text);
        return found == map.end() ? -1 : found->second;
    };

    std::mt19937          random(1);
    std::vector<uint32_t> order(N_LOOKUPS);
    for (uint32_t & i : order) {
        i = static_cast<uint32_t>(random() % n);
    }
    const double hit       = measure(order, true, [&](uint32_t i) { return test::find(bundle, kernels[i]); });
    const double miss      = measure(order, false, [&](uint32_t i) { return test::find(bundle, others[i]); });
    const double text_hit  = measure(order, true, [&](uint32_t i) { return find_text(text_key(kernels[i])); });
    const double text_miss = measure(order, false, [&](uint32_t i) { return find_text(text_key(others[i])); });
    const double map_hit   = measure(order, true, [&](uint32_t i) { return find_text(texts[i]); });
    const double map_miss  = measure(order, false, [&](uint32_t i) { return find_text(other_texts[i]); });
    neuron_kernels_close(bundle);

    printf("%zu kernels, index of %.1f MB opened and checked in %.1f ms\n\n", n,
           static_cast<double>(bytes.size()) / 1e6, open_time.count());
    printf("ns per lookup                  hit      miss\n");
    printf("bundle                    %8.0f  %8.0f\n", hit, miss);
    printf("map, text made each time  %8.0f  %8.0f   %.1f and %.1f times the bundle's\n", text_hit, text_miss,
           text_hit / hit, text_miss / miss);
    printf("map, text ready           %8.0f  %8.0f   %.1f and %.1f times the bundle's\n", map_hit, map_miss,
           map_hit / hit, map_miss / miss);
    if (!json.empty() && !write_json(json, n, open_time.count(), hit, miss, text_hit, text_miss, max_ns)) {
        return 1;
    }
    if (max_ns > 0 && hit > max_ns) {
        fprintf(stderr, "a hit takes %.0f ns, more than %.0f\n", hit, max_ns);
        return 1;
    }
    return 0;
}
