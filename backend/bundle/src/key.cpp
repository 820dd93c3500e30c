#include "key.h"

#include "ascii.h"
#include "error.h"
#include "graph_key.h"
#include "hash.h"

#include <cstring>

namespace nk {

namespace {

// Indexed by `enum ggml_type`. Its numbers never change, because GGUF files hold them. { 0, 0 } marks a number without
// a type. tools/kernelgen/ggml/types.py has the same table; a test compares the two.
constexpr type_traits TYPES[] = {
    { 1,   4   }, // 0 f32
    { 1,   2   }, // 1 f16
    { 32,  18  }, // 2 q4_0
    { 32,  20  }, // 3 q4_1
    { 0,   0   }, // 4
    { 0,   0   }, // 5
    { 32,  22  }, // 6 q5_0
    { 32,  24  }, // 7 q5_1
    { 32,  34  }, // 8 q8_0
    { 32,  36  }, // 9 q8_1
    { 256, 84  }, // 10 q2_K
    { 256, 110 }, // 11 q3_K
    { 256, 144 }, // 12 q4_K
    { 256, 176 }, // 13 q5_K
    { 256, 210 }, // 14 q6_K
    { 256, 292 }, // 15 q8_K
    { 256, 66  }, // 16 iq2_xxs
    { 256, 74  }, // 17 iq2_xs
    { 256, 98  }, // 18 iq3_xxs
    { 256, 50  }, // 19 iq1_s
    { 32,  18  }, // 20 iq4_nl
    { 256, 110 }, // 21 iq3_s
    { 256, 82  }, // 22 iq2_s
    { 256, 136 }, // 23 iq4_xs
    { 1,   1   }, // 24 i8
    { 1,   2   }, // 25 i16
    { 1,   4   }, // 26 i32
    { 1,   8   }, // 27 i64
    { 1,   8   }, // 28 f64
    { 256, 56  }, // 29 iq1_m
    { 1,   2   }, // 30 bf16
    { 0,   0   }, // 31
    { 0,   0   }, // 32
    { 0,   0   }, // 33
    { 256, 54  }, // 34 tq1_0
    { 256, 66  }, // 35 tq2_0
    { 0,   0   }, // 36
    { 0,   0   }, // 37
    { 0,   0   }, // 38
    { 32,  17  }, // 39 mxfp4
    { 64,  36  }, // 40 nvfp4
    { 128, 18  }, // 41 q1_0
    { 64,  18  }, // 42 q2_0
};

bool add_tensor(const neuron_kernels_tensor & tensor, key & out) {
    const type_traits * type = find_type(tensor.type);
    if (!type) {
        return false;
    }
    uint64_t nb[4] = { tensor.nb[0], tensor.nb[1], tensor.nb[2], tensor.nb[3] };
    if (!canonicalize(*type, tensor.ne, nb)) {
        return false;
    }
    uint64_t * words = out.words + out.n_words;
    words[0]         = static_cast<uint64_t>(tensor.type);
    for (int i = 0; i < 4; i++) {
        words[1 + i] = static_cast<uint64_t>(tensor.ne[i]);
        words[5 + i] = nb[i];
    }
    out.n_words += TENSOR_WORDS;
    return true;
}

}  // namespace

const type_traits * find_type(int64_t number) {
    if (number >= 0 && number >> NEURON_KERNELS_FORM_SHIFT <= NEURON_KERNELS_LAST_FORM) {
        number &= (1 << NEURON_KERNELS_FORM_SHIFT) - 1;
    }
    if (number < 0 || number >= static_cast<int64_t>(sizeof(TYPES) / sizeof(TYPES[0])) || TYPES[number].block == 0) {
        return nullptr;
    }
    return &TYPES[number];
}

bool canonicalize(const type_traits & type, const int64_t ne[4], uint64_t nb[4]) {
    if (ne[0] <= 0 || ne[1] <= 0 || ne[2] <= 0 || ne[3] <= 0) {
        return false;
    }
    uint64_t previous = static_cast<uint64_t>(ne[0]);
    if (type.block > 1) {  // a division takes longer than the rest of this function
        if (previous % type.block != 0) {
            return false;
        }
        previous /= type.block;
    }
    if (previous == 1) {
        nb[0] = type.size;
    }
    // Products wrap around for shapes that no memory can hold; no bundle has such a key.
    for (int i = 1; i < 4; i++) {
        if (ne[i] == 1) {
            nb[i] = nb[i - 1] * previous;
        }
        previous = static_cast<uint64_t>(ne[i]);
    }
    return true;
}

bool make_key(const char *                  op,
              const int32_t *               op_params,
              const neuron_kernels_tensor * inputs,
              size_t                        n_inputs,
              const neuron_kernels_tensor & output,
              int32_t                       alias,
              key &                         out) {
    while (n_inputs > 0 && inputs[n_inputs - 1].type == NEURON_KERNELS_ABSENT) {
        n_inputs--;
    }
    if (n_inputs > NEURON_KERNELS_MAX_INPUTS || alias < NEURON_KERNELS_NO_ALIAS) {
        return false;
    }
    out.words[0] = hash_op(op);
    out.words[1] = n_inputs | static_cast<uint64_t>(alias + 1) << 32;
    out.n_words  = 2;
    for (size_t i = 0; i < n_inputs; i++) {
        if (inputs[i].type == NEURON_KERNELS_ABSENT) {
            out.words[out.n_words++] = ABSENT_WORD;
        } else if (!add_tensor(inputs[i], out)) {
            return false;
        }
    }
    if (!add_tensor(output, out)) {
        return false;
    }
    if (op_params) {
        memcpy(out.words + out.n_words, op_params, PARAM_WORDS * sizeof(uint64_t));
    } else {
        memset(out.words + out.n_words, 0, PARAM_WORDS * sizeof(uint64_t));
    }
    out.n_words += PARAM_WORDS;
    return true;
}

const char * check_key_tensor(const uint64_t * words) {
    int64_t  ne[4];
    uint64_t nb[4];
    for (int i = 0; i < 4; i++) {
        ne[i] = static_cast<int64_t>(words[1 + i]);
        nb[i] = words[5 + i];
        if (ne[i] <= 0) {
            return "a tensor has a dimension that is not positive";
        }
        if (nb[i] > INT64_MAX) {
            return "a tensor has a stride of 2^63 or more";
        }
    }
    if (words[0] > INT32_MAX) {
        return "a tensor has an impossible type";
    }
    // A type that is newer than this library is not an error: this library looks up no node of that type, and the other
    // kernels work.
    if (const type_traits * type = find_type(static_cast<int64_t>(words[0]))) {
        if (!canonicalize(*type, ne, nb)) {
            return "a tensor's rows are not whole blocks of its type";
        }
        if (memcmp(nb, words + 5, sizeof(nb)) != 0) {
            return "a tensor's strides are not canonical, so it could not be found";
        }
    }
    return nullptr;
}

const char * check_key(const uint64_t * words, size_t n_words) {
    constexpr const char * LENGTH = "its length does not fit its inputs";

    if (n_words > 0 && words[0] == hash_op(GRAPH)) {
        return check_graph_key(words, n_words);
    }
    if (n_words == SOURCE_WORDS && words[0] == hash_op(SOURCE)) {
        return nullptr;
    }
    if (n_words < 2 + TENSOR_WORDS + PARAM_WORDS) {
        return "it is too short";
    }
    const uint64_t n_inputs = words[1] & 0xFFFFFFFF;
    const uint64_t alias    = words[1] >> 32;  // + 1
    size_t         left     = n_words - 2 - TENSOR_WORDS - PARAM_WORDS;
    bool           absent   = false;
    if (n_inputs > NEURON_KERNELS_MAX_INPUTS) {
        return "it has more inputs than any, so it could not be found";
    }
    words += 2;
    for (uint64_t i = 0; i < n_inputs; i++) {
        if (left == 0) {
            return LENGTH;
        }
        absent             = words[0] == ABSENT_WORD;
        const size_t width = absent ? 1 : TENSOR_WORDS;
        if (left < width) {
            return LENGTH;
        }
        if (absent) {
            if (alias == i + 1) {
                return "the result shares the memory of an input that is absent";
            }
        } else if (const char * problem = check_key_tensor(words)) {
            return problem;
        }
        words += width;
        left -= width;
    }
    if (left != 0) {
        return LENGTH;
    }
    if (absent) {
        return "its last input is absent";
    }
    if (alias > n_inputs) {
        return "the result shares the memory of an input that it does not have";
    }
    return check_key_tensor(words);  // the result
}

namespace {

// FNV-1a
constexpr uint64_t FNV_BEGIN = 0xCBF29CE484222325;

uint64_t fnv_add(uint64_t h, char c) {
    return (h ^ static_cast<unsigned char>(c)) * 0x100000001B3;
}

}  // namespace

uint64_t hash_op(std::string_view name) {
    uint64_t h = FNV_BEGIN;
    for (const char c : name) {
        h = fnv_add(h, lower(c));
    }
    return h;
}

void make_source_key(std::string_view name, uint64_t words[SOURCE_WORDS]) {
    words[0] = hash_op(SOURCE);
    words[1] = name.size();
    words[2] = FNV_BEGIN;
    for (const char c : name) {
        words[2] = fnv_add(words[2], c);
    }
}

std::vector<uint32_t> make_slots(const std::vector<uint64_t> & words, const std::vector<uint32_t> & offsets) {
    const size_t n    = offsets.size() - 1;
    size_t       size = MIN_SLOTS;
    while (size < 2 * n) {
        size *= 2;
    }
    std::vector<uint32_t> slots(size);
    uint64_t              steps_left = max_steps(n);
    for (size_t i = 0; i < n; i++) {
        size_t slot = hash_words(words.data() + offsets[i], offsets[i + 1] - offsets[i]) & (size - 1);
        while (slots[slot] != 0) {
            if (--steps_left == 0) {
                fail(NEURON_KERNELS_ERROR_CORRUPT,
                     "its keys have more equal hashes than in any bundle that kernelgen writes");
            }
            slot = (slot + 1) & (size - 1);
        }
        slots[slot] = static_cast<uint32_t>(i + 1);
    }
    return slots;
}

}  // namespace nk
