// Looks up every kernel of a bundle, as a backend does, from the table that lookups.py writes.

#pragma once

#include "check.h"
#include "neuron_kernels.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace test {

struct lookup {
    std::string                        id;
    std::string                        op;
    int32_t                            alias;
    int32_t                            op_params[NEURON_KERNELS_N_OP_PARAMS];
    std::vector<neuron_kernels_tensor> inputs;
    neuron_kernels_tensor              output;
};

inline int32_t find(const neuron_kernels * bundle, const lookup & k) {
    return neuron_kernels_find(bundle, k.op.c_str(), k.op_params, k.inputs.data(), k.inputs.size(), &k.output, k.alias);
}

inline neuron_kernels_tensor parse_tensor(const std::string & text) {
    neuron_kernels_tensor tensor = { NEURON_KERNELS_ABSENT, {}, {} };
    if (text != "-") {
        std::istringstream in(text);
        in >> tensor.type;
        for (int64_t & ne : tensor.ne) {
            in >> ne;
        }
        for (uint64_t & nb : tensor.nb) {
            in >> nb;
        }
        CHECK_MSG(!in.fail(), "'%s' is not a tensor", text.c_str());
    }
    return tensor;
}

inline std::vector<std::string> split(const std::string & text, char separator) {
    std::vector<std::string> parts(1);
    for (char c : text) {
        if (c == separator) {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

// Reads the first six fields of a line.
inline lookup parse_lookup(const std::vector<std::string> & fields) {
    lookup             k = { fields[0], fields[1], std::stoi(fields[2]), {}, {}, parse_tensor(fields[5]) };
    std::istringstream words(fields[3]);
    for (int32_t & word : k.op_params) {
        words >> word;
    }
    CHECK_MSG(!words.fail(), "op_params of %s", fields[0].c_str());
    if (!fields[4].empty()) {
        for (const std::string & input : split(fields[4], '|')) {
            k.inputs.push_back(parse_tensor(input));
        }
    }
    return k;
}

inline std::vector<lookup> read_lookups(const char * path) {
    std::ifstream       file(path);
    std::vector<lookup> out;
    for (std::string line; std::getline(file, line);) {
        const std::vector<std::string> fields = split(line, '\t');
        CHECK_MSG(fields.size() == 6, "line %zu of %s", out.size() + 1, path);
        if (fields.size() != 6) {
            break;
        }
        out.push_back(parse_lookup(fields));
    }
    CHECK_MSG(!out.empty(), "%s names no kernel", path);
    return out;
}

// Returns whether the bytes are the header of a simulated NEFF and the number of bytes that it states
// (docs/reference/simulated-neff.md).
inline bool is_simulated_neff(const void * data, size_t size) {
    constexpr char   BUILD[]     = "kernelgen-simulator";
    constexpr size_t HEADER_SIZE = 1024;

    if (size < HEADER_SIZE) {
        return false;
    }
    uint64_t header_size, data_size;
    memcpy(&header_size, static_cast<const char *>(data) + 8, 8);
    memcpy(&data_size, static_cast<const char *>(data) + 16, 8);
    return header_size == HEADER_SIZE && data_size == size - HEADER_SIZE &&
           memcmp(static_cast<const char *>(data) + 40, BUILD, sizeof(BUILD) - 1) == 0;
}

// Checks that a bundle holds exactly the kernels of a table, that each is found by its description and by its id, and
// that its NEFF equals the index's digest. Also checks that a description that differs in any part finds another kernel
// or none.
inline void check_bundle(const neuron_kernels * bundle, const std::vector<lookup> & lookups) {
    CHECK_MSG(neuron_kernels_count(bundle) == lookups.size(), "%zu in the bundle, %zu in the table",
              neuron_kernels_count(bundle), lookups.size());
    for (const lookup & k : lookups) {
        const int32_t number = find(bundle, k);
        CHECK_MSG(number != NEURON_KERNELS_NOT_FOUND, "%s", k.id.c_str());
        CHECK_MSG(neuron_kernels_find_id(bundle, k.id.c_str()) == number, "%s", k.id.c_str());
        const char * id = neuron_kernels_id(bundle, number);
        CHECK_MSG(id && k.id == id, "%s", k.id.c_str());
        size_t       size;
        const void * neff = neuron_kernels_neff(bundle, number, &size);
        CHECK_MSG(neff && size > 0, "%s", k.id.c_str());
        char message[NEURON_KERNELS_MESSAGE_SIZE];
        CHECK_MSG(neuron_kernels_verify(bundle, number, message, sizeof(message)) == NEURON_KERNELS_OK, "%s: %s",
                  k.id.c_str(), message);
        if (neuron_kernels_simulated(bundle)) {
            CHECK_MSG(is_simulated_neff(neff, size), "%s", k.id.c_str());
        }

        const auto differs = [&](const char * what, auto change) {
            lookup changed = k;
            change(changed);
            CHECK_MSG(find(bundle, changed) != number, "%s of %s changed", what, k.id.c_str());
        };
        differs("op", [](lookup & l) { l.op += "_"; });
        differs("alias", [](lookup & l) { l.alias = l.alias == 0 ? 1 : 0; });
        for (int i = 0; i < NEURON_KERNELS_N_OP_PARAMS; i++) {
            differs("op_params", [&](lookup & l) { l.op_params[i] += 1; });
        }
        differs("number of inputs", [](lookup & l) { l.inputs.push_back(l.output); });
        for (size_t i = 0; i <= k.inputs.size(); i++) {
            const neuron_kernels_tensor & unchanged = i < k.inputs.size() ? k.inputs[i] : k.output;
            const auto                    tensor    = [&](lookup & l) -> neuron_kernels_tensor & {
                return i < l.inputs.size() ? l.inputs[i] : l.output;
            };
            if (unchanged.type == NEURON_KERNELS_ABSENT) {
                differs("presence", [&](lookup & l) { tensor(l) = l.output; });
                continue;
            }
            differs("type", [&](lookup & l) { tensor(l).type = unchanged.type == 0 ? 26 : 0; });
            for (int d = 0; d < 4; d++) {
                differs("shape", [&](lookup & l) { tensor(l).ne[d] += 256; });
                // Skip the first stride of a quantized type when the row may be one block: the table does not state the
                // block's size.
                if (unchanged.ne[d] > (d == 0 ? 256 : 1)) {
                    differs("stride", [&](lookup & l) { tensor(l).nb[d] += 64; });
                }
            }
            if (i < k.inputs.size()) {
                differs("presence", [&](lookup & l) { tensor(l).type = NEURON_KERNELS_ABSENT; });
            }
            // the differences that do not matter: ggml leaves any value in the strides of dimensions with one element
            lookup same = k;
            for (int d = 1; d < 4; d++) {
                if (unchanged.ne[d] == 1) {
                    tensor(same).nb[d] = 987654321;
                }
            }
            CHECK_MSG(find(bundle, same) == number, "%s", k.id.c_str());
        }
    }
    CHECK(neuron_kernels_find_id(bundle, "no-such-kernel") == NEURON_KERNELS_NOT_FOUND);
}

}  // namespace test
