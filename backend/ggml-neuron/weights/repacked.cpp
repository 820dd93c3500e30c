#include "weights/repacked.h"

#include "../../bundle/src/error.h"
#include "../../bundle/src/gguf.h"
#include "report/environment.h"
#include "report/log.h"
#include "weights/layouts.h"
#include "weights/threads.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

// The same as in tools/kernelgen/model/repacked.py; tests load its files.
static constexpr uint64_t     STEP         = 0x9E3779B97F4A7C15;
static constexpr uint32_t     FORMAT       = 1;
static constexpr const char * ARCHITECTURE = "neuron-repacked";

// Bytes that a thread reads and digests at once: they fit a CPU cache.
static constexpr size_t PIECE = (size_t) 256 << 10;

static uint64_t term(uint64_t word, uint64_t key) {
    const uint64_t x = word ^ key;
    return x + (x & 0xFFFFFFFF) * (x >> 32);
}

// Returns the sum of the words' terms; the last word is padded with 0.
static uint64_t sum_of(const uint8_t * data, size_t n_bytes, uint64_t first_word) {
    uint64_t sum  = 0;
    uint64_t key  = first_word * STEP;
    uint64_t word = 0;
    size_t   at   = 0;
    for (; at + sizeof(word) <= n_bytes; at += sizeof(word)) {
        key += STEP;
        memcpy(&word, data + at, sizeof(word));
        sum += term(word, key);
    }
    if (at < n_bytes) {
        word = 0;
        memcpy(&word, data + at, n_bytes - at);
        sum += term(word, key + STEP);
    }
    return sum;
}

uint64_t neuron_digest_of(uint64_t sum, size_t n_bytes) {
    const uint64_t n_words = (n_bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    return sum + term(n_bytes, (n_words + 1) * STEP);
}

// Calls use(first byte, bytes) for pieces, in threads.
template <typename F> static void in_pieces(size_t n_bytes, F use) {
    neuron_in_threads((n_bytes + PIECE - 1) / PIECE, n_bytes, [n_bytes, use](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) {
            use(i * PIECE, std::min(PIECE, n_bytes - i * PIECE));
        }
    });
}

static uint64_t digest(const uint8_t * data, size_t n_bytes) {
    std::atomic<uint64_t> sum{ 0 };
    in_pieces(n_bytes, [&sum, data](size_t at, size_t n) { sum += sum_of(data + at, n, at / sizeof(uint64_t)); });
    return neuron_digest_of(sum, n_bytes);
}

bool neuron_repacked_weight::read(size_t at, uint8_t * to, size_t n, uint64_t & sum) const {
    std::atomic<uint64_t> more{ 0 };
    std::atomic<bool>     good{ true };
    in_pieces(n, [this, at, to, &more, &good](size_t begin, size_t size) {
        try {
            file->bytes.read(offset + at + begin, to + begin, size);
            more += sum_of(to + begin, size, (at + begin) / sizeof(uint64_t));
        } catch (const nk::error &) {
            good = false;
        }
    });
    sum += more;
    return good;
}

bool neuron_repacked_weight::is_like(const ggml_tensor * t) const {
    const neuron_layout layout(t);
    return words[0] == (uint64_t) neuron_type_of(t) &&
           std::equal(std::begin(t->ne), std::end(t->ne), words + 1,
                      [](int64_t have, uint64_t wanted) { return (uint64_t) have == wanted; }) &&
           size == ggml_nbytes(t) / layout.unit() * layout.stored_unit();
}

// Adds the weights of a file. Throws nk::error.
static void add_file(const std::string & path, neuron_repacked_weights & all) {
    auto file = std::make_shared<neuron_repacked_file>(neuron_repacked_file{ path, "", nk::mapping(path.c_str()) });
    const nk::gguf_file gguf         = nk::gguf_read(file->bytes.data(), file->bytes.size());
    const auto *        architecture = gguf.find("general.architecture");
    if (!architecture || gguf.string("general.architecture") != ARCHITECTURE) {
        nk::fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "it is GGUF, and not what kernelgen repack writes");
    }
    if (const uint32_t format = gguf.u32("kernelgen.format"); format != FORMAT) {
        nk::fail(NEURON_KERNELS_ERROR_VERSION, "it has format %" PRIu32 ", and this backend reads format %" PRIu32,
                 format, FORMAT);
    }
    file->model                       = gguf.string("general.name");
    const std::vector<uint64_t> words = gguf.u64_array("kernelgen.weights.words");
    if (words.size() != gguf.tensors.size() * NEURON_REPACKED_WORDS) {
        nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "it is damaged: it has %zu weights, and %zu words about them",
                 gguf.tensors.size(), words.size());
    }
    neuron_repacked_weights found;
    for (size_t i = 0; i < gguf.tensors.size(); i++) {
        const nk::gguf_tensor & tensor = gguf.tensors[i];
        neuron_repacked_weight  weight;
        weight.file   = file;
        weight.offset = (size_t) (tensor.data - file->bytes.data());
        weight.size   = (size_t) tensor.size;
        std::copy_n(words.data() + i * NEURON_REPACKED_WORDS, NEURON_REPACKED_WORDS, weight.words);
        uint64_t sealed[NEURON_REPACKED_WORDS];
        std::copy_n(weight.words, NEURON_REPACKED_WORDS - 1, sealed);
        sealed[NEURON_REPACKED_WORDS - 1] = tensor.size;
        const std::string text            = std::string((const char *) sealed, sizeof(sealed)).append(tensor.name);
        if (digest((const uint8_t *) text.data(), text.size()) != weight.words[NEURON_REPACKED_WORDS - 1]) {
            nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "it is damaged: what it says of %s is not what was written",
                     nk::quoted(tensor.name).c_str());
        }
        found.emplace(std::string(tensor.name), weight);
    }
    all.merge(found);
}

static neuron_repacked_weights open_files() {
    neuron_repacked_weights all;
    std::istringstream      paths(neuron_variable("GGML_NEURON_REPACKED"));
    for (std::string path; std::getline(paths, path, ':');) {
        if (path.empty()) {
            continue;
        }
        try {
            add_file(path, all);
        } catch (const nk::error & error) {
            NEURON_WARN("GGML_NEURON_REPACKED: %s can't be used: %s\n"
                        "its weights are repacked at load\n"
                        "to write such a file: kernelgen repack MODEL.gguf KERNELS\n",
                        path.c_str(), error.message.c_str());
        }
    }
    return all;
}

const neuron_repacked_weights & neuron_repacked_files() {
    // Never destroyed: destructors may still fill buffers.
    static const auto * all = new neuron_repacked_weights(open_files());
    return *all;
}

const neuron_repacked_weight * neuron_find_repacked(const ggml_tensor * t, const uint8_t * data, std::string & why) {
    const auto [first, last] = neuron_repacked_files().equal_range(t->name);
    why                      = "no file has a weight of this name";
    bool     digested        = false;
    uint64_t of_data         = 0;
    for (auto i = first; i != last; i++) {
        const neuron_repacked_weight & weight = i->second;
        if (!weight.is_like(t)) {
            if (!digested) {
                why = weight.file->path + " has it of another type or shape, or in another layout";
            }
            continue;
        }
        of_data  = digested ? of_data : digest(data, ggml_nbytes(t));
        digested = true;
        if (weight.original() == of_data) {
            return &weight;
        }
        why = weight.file->path + " is for other bytes, those of " + weight.file->model;
    }
    return nullptr;
}
