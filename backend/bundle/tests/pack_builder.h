// Makes packs in memory, valid and invalid: a test can change every value and tensor before the bytes are written.
//
// It computes keys and their hash table with the library's own code, so it can't test that code. key_test and tests
// with kernelgen's packs do that.

#pragma once

#include "neuron_kernels.h"
#include "src/key.h"
#include "src/sha256.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace test {

enum : uint32_t { U32 = 4, I32 = 5, BOOL = 7, STRING = 8, ARRAY = 9, U64 = 10 };

template <typename T> std::string raw(T value) {
    return std::string(reinterpret_cast<const char *>(&value), sizeof(value));
}

inline std::string text(const std::string & value) {
    return raw<uint64_t>(value.size()) + value;
}

template <typename T> std::string array(uint32_t type, const std::vector<T> & items) {
    std::string out = raw(type) + raw<uint64_t>(items.size());
    for (const T & item : items) {
        if constexpr (std::is_same_v<T, std::string>) {
            out += text(item);
        } else {
            out += raw(item);
        }
    }
    return out;
}

// A kernel, as the arguments of neuron_kernels_find describe it.
struct kernel {
    std::string                        op;
    std::vector<neuron_kernels_tensor> inputs;
    neuron_kernels_tensor              output;
    int32_t                            alias                                 = NEURON_KERNELS_NO_ALIAS;
    int32_t                            op_params[NEURON_KERNELS_N_OP_PARAMS] = {};
    std::vector<uint64_t>              words = {};  // key of a graph kernel, in place of all members above
};

inline int32_t find(const neuron_kernels * bundle, const kernel & k) {
    if (!k.words.empty()) {
        return neuron_kernels_find_words(bundle, k.words.data(), k.words.size());
    }
    return neuron_kernels_find(bundle, k.op.c_str(), k.op_params, k.inputs.data(), k.inputs.size(), &k.output, k.alias);
}

inline neuron_kernels_tensor dense(int32_t type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1, int64_t ne3 = 1) {
    neuron_kernels_tensor tensor = {
        type, { ne0, ne1, ne2, ne3 },
         {}
    };
    if (neuron_kernels_set_dense(&tensor) != 0) {
        std::fprintf(stderr, "not a tensor: type %d, ne0 %lld\n", type, static_cast<long long>(ne0));
        std::abort();
    }
    return tensor;
}

inline std::vector<uint64_t> key_words(const kernel & k) {
    if (!k.words.empty()) {
        return k.words;
    }
    nk::key key;
    if (!nk::make_key(k.op.c_str(), k.op_params, k.inputs.data(), k.inputs.size(), k.output, k.alias, key)) {
        std::fprintf(stderr, "no key for a kernel of op %s\n", k.op.c_str());
        std::abort();
    }
    return { key.words, key.words + key.n_words };
}

// A GGUF file in parts.
struct pack {
    struct value {
        std::string key;
        uint32_t    type;
        std::string bytes;
    };

    struct tensor {
        std::string name;
        std::string data;
        uint32_t    n_dims;
        uint32_t    type;
        uint64_t    size;
        uint64_t    offset;
    };

    std::string         magic   = "GGUF";
    uint32_t            version = 3;
    std::vector<value>  values;
    std::vector<tensor> tensors;

    value & at(const std::string & key) {
        for (value & v : values) {
            if (v.key == key) {
                return v;
            }
        }
        std::fprintf(stderr, "no metadata %s\n", key.c_str());
        std::abort();
    }

    void set(const std::string & key, uint32_t type, const std::string & bytes) { at(key) = { key, type, bytes }; }

    void erase(const std::string & key) { values.erase(values.begin() + (&at(key) - values.data())); }

    std::string bytes() const {
        std::string out = magic + raw(version) + raw<uint64_t>(tensors.size()) + raw<uint64_t>(values.size());
        for (const value & v : values) {
            out += text(v.key) + raw(v.type) + v.bytes;
        }
        for (const tensor & t : tensors) {
            out += text(t.name) + raw(t.n_dims) + raw(t.size) + raw(t.type) + raw(t.offset);
        }
        for (const tensor & t : tensors) {
            out.resize((out.size() + 63) & ~size_t(63));
            out += t.data;
        }
        out.resize((out.size() + 63) & ~size_t(63));
        return out;
    }
};

inline std::string kernel_id(size_t i) {
    char id[32];
    std::snprintf(id, sizeof(id), "kernel-%07zu", i);
    return id;
}

// Returns the bytes of kernel i's NEFF in `make_pack`: the kernel's number, repeated, with a length that differs per
// kernel.
inline std::string neff_bytes(size_t i) {
    std::string out;
    for (size_t j = 0; j <= i % 50; j++) {
        out += std::to_string(i) + "\n";
    }
    return out;
}

inline std::string digest_of(const std::string & bytes) {
    char digits[nk::SHA256_DIGITS + 1];
    nk::sha256(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), digits);
    return digits;
}

// Returns a valid pack. Its kernel i is kernels[i] and has the id kernel_id(i). The last two kernels share a NEFF.
inline pack make_pack(const std::vector<kernel> & kernels) {
    const size_t             n       = kernels.size();
    const size_t             n_neffs = n > 1 ? n - 1 : 1;
    std::vector<std::string> ids, specs, hlos, digests;
    std::vector<uint32_t>    neffs, offsets = { 0 };
    std::vector<uint64_t>    words;
    pack                     out;
    for (size_t i = 0; i < n; i++) {
        char digest[65];
        std::snprintf(digest, sizeof(digest), "%032zx%032zx", i, n);
        ids.push_back(kernel_id(i));
        specs.push_back("{}");
        hlos.push_back(digest);
        neffs.push_back(static_cast<uint32_t>(i < n_neffs ? i : n_neffs - 1));
        const std::vector<uint64_t> key = key_words(kernels[i]);
        words.insert(words.end(), key.begin(), key.end());
        offsets.push_back(static_cast<uint32_t>(words.size()));
        if (i < n_neffs) {
            const std::string data   = neff_bytes(i);
            const uint64_t    offset = out.tensors.empty() ? 0 : out.tensors.back().offset + out.tensors.back().size;
            digests.push_back(digest_of(data));
            out.tensors.push_back(
                { "neff." + digests.back().substr(0, 32), data, 1, 24, data.size(), (offset + 63) & ~uint64_t(63) });
        }
    }
    out.values = {
        { "general.architecture", STRING, text("neuron-kernels") },
        { "general.alignment", U32, raw<uint32_t>(64) },
        { "general.name", STRING, text("test_trn1") },
        { "kernelgen.format", U32, raw<uint32_t>(NEURON_KERNELS_FORMAT) },
        { "kernelgen.name", STRING, text("test") },
        { "kernelgen.target", STRING, text("trn1") },
        { "kernelgen.lnc", U32, raw<uint32_t>(1) },
        { "kernelgen.simulated", BOOL, raw<uint8_t>(1) },
        { "kernelgen.compiler", STRING, text("simulator 1") },
        { "kernelgen.flags", ARRAY, array<std::string>(STRING, { "-O", "2" }) },
        { "kernelgen.version", STRING, text("0.1.0") },
        { "kernelgen.jax_version", STRING, text("0.10.2") },
        { "kernelgen.kernel.ids", ARRAY, array(STRING, ids) },
        { "kernelgen.kernel.specs", ARRAY, array(STRING, specs) },
        { "kernelgen.kernel.hlo_sha256", ARRAY, array(STRING, hlos) },
        { "kernelgen.kernel.neff", ARRAY, array(U32, neffs) },
        { "kernelgen.neff.sha256", ARRAY, array(STRING, digests) },
        { "kernelgen.key.words", ARRAY, array(U64, words) },
        { "kernelgen.key.offsets", ARRAY, array(U32, offsets) },
        { "kernelgen.key.slots", ARRAY, array(U32, nk::make_slots(words, offsets)) },
    };
    return out;
}

// Returns the program memory of NEFF `i` in the packs of tests.
inline std::vector<uint64_t> neff_memory(size_t i) {
    return { 64 * i, 32 * i + 1, i % 2 ? uint64_t(1) << 40 : 0 };
}

// Adds the memory of programs to a pack.
inline void add_memory(pack & p) {
    std::vector<uint64_t> all;
    for (size_t i = 0; i < p.tensors.size(); i++) {
        const std::vector<uint64_t> memory = neff_memory(i);
        all.insert(all.end(), memory.begin(), memory.end());
    }
    p.values.push_back({ "kernelgen.neff.memory", ARRAY, array(U64, all) });
}

// A few kernels of different kinds.
inline std::vector<kernel> sample_kernels() {
    constexpr int32_t F32 = 0, F16 = 1, Q4_K = 12, I64 = 27;

    std::vector<kernel> kernels = {
        { "add", { dense(F32, 64, 8), dense(F32, 64) }, dense(F32, 64, 8) },
        { "mul_mat", { dense(F16, 256, 32), dense(F32, 256, 5) }, dense(F32, 32, 5) },
        { "mul_mat", { dense(Q4_K, 512, 32), dense(F32, 512, 5) }, dense(F32, 32, 5) },
        { "set_rows", { dense(F32, 16, 5), dense(I64, 5), dense(F16, 16, 100) }, dense(F16, 16, 100), 2 },
        { "soft_max", { dense(F32, 16, 5), { NEURON_KERNELS_ABSENT, {}, {} }, dense(F32, 16) }, dense(F32, 16, 5) },
        { "rms_norm", { dense(F32, 64, 8) }, dense(F32, 64, 8) },
        { "rms_norm", { dense(F32, 64, 8) }, dense(F32, 64, 8) },
        { "no_inputs", {}, dense(F32, 64) },
    };
    kernels[5].op_params[0]  = 0x3727C5AC;  // eps = 1e-5
    kernels[6].op_params[15] = -1;
    // A permuted view: rows of 64 F16 elements, 3 of them, 7 apart.
    kernels.push_back({ "cont", { { F16, { 64, 3, 7, 1 }, { 2, 896, 128, 2688 } } }, dense(F16, 64, 3, 7) });
    return kernels;
}

// A builder for the key of a graph.
struct graph {
    std::vector<uint64_t> extents;
    std::vector<uint64_t> nodes = {};
    uint64_t              n     = 0;

    struct input {
        bool                  is_slot;
        uint64_t              index;
        uint64_t              offset;
        neuron_kernels_tensor tensor;
    };

    static void add_tensor(const neuron_kernels_tensor & t, std::vector<uint64_t> & words) {
        words.push_back(static_cast<uint64_t>(t.type));
        words.insert(words.end(), t.ne, t.ne + 4);
        words.insert(words.end(), t.nb, t.nb + 4);
    }

    // An input of type NEURON_KERNELS_ABSENT is absent. `in` is the place of a result without its own memory.
    graph & node(const char *                  op,
                 const std::vector<input> &    inputs,
                 const neuron_kernels_tensor & result,
                 bool                          escapes = false,
                 const input *                 in      = nullptr) {
        nodes.push_back(nk::hash_op(op));
        nodes.push_back(inputs.size() | static_cast<uint64_t>(escapes) << 32);
        nodes.push_back(in ? 2 * in->index + in->is_slot + 1 : 0);
        nodes.push_back(in ? in->offset : 0);
        add_tensor(result, nodes);
        for (const input & i : inputs) {
            if (i.tensor.type == NEURON_KERNELS_ABSENT) {
                nodes.push_back(nk::ABSENT_WORD);
                continue;
            }
            nodes.push_back(2 * i.index + i.is_slot);
            nodes.push_back(i.offset);
            add_tensor(i.tensor, nodes);
        }
        nodes.insert(nodes.end(), nk::PARAM_WORDS, 0);
        n++;
        return *this;
    }

    kernel done() const {
        kernel k;
        k.words = { nk::hash_op("graph"), n | static_cast<uint64_t>(extents.size()) << 32 };
        k.words.insert(k.words.end(), extents.begin(), extents.end());
        k.words.insert(k.words.end(), nodes.begin(), nodes.end());
        return k;
    }
};

// A norm, its scaling and a product; the write to a cache at an offset, and the read after it.
inline std::vector<kernel> sample_graphs() {
    constexpr int32_t F32 = 0, F16 = 1, I64 = 27;

    const neuron_kernels_tensor x = dense(F32, 64, 8), w = dense(F32, 64), a = dense(F16, 64, 32),
                                y      = dense(F32, 32, 8);
    const neuron_kernels_tensor absent = { NEURON_KERNELS_ABSENT, {}, {} };
    graph                       norm{
        { 64 * 8 * 4, 64 * 4, 64 * 32 * 2 }
    };
    norm.node("rms_norm",
              {
                  { true, 0, 0, x }
    },
              x)
        .node("mul", { { false, 0, 0, x }, { true, 1, 0, w } }, x)
        .node("mul_mat", { { true, 2, 0, a }, { false, 1, 0, x } }, y, true);

    // 100 rows of 16 F16 elements; the first three are never used
    const neuron_kernels_tensor fresh = dense(F32, 16, 5), rows = dense(I64, 5), cells = dense(F16, 16, 97);
    const neuron_kernels_tensor seen = dense(F16, 16, 40);
    const graph::input          all{ true, 2, 0, cells };
    graph                       cache{
        { 16 * 5 * 4, 5 * 8, 16 * 97 * 2 }
    };
    cache
        .node("set_rows",
              {
                  { true, 0, 0, fresh },
                  { true, 1, 0, rows  },
                  all
    },
              cells, false, &all)
        .node("soft_max", { { true, 2, 16 * 10 * 2, seen }, { false, 0, 0, absent }, { true, 0, 0, fresh } }, seen,
              true);
    return { norm.done(), cache.done() };
}

}  // namespace test
