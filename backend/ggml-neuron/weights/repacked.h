// Weights that `kernelgen repack` packed into a layout, in files that GGML_NEURON_REPACKED names:
// docs/reference/repacked-weights.md.

#pragma once

#include "../../bundle/src/mapping.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

// Words per weight in a file's `kernelgen.weights.words`.
constexpr size_t NEURON_REPACKED_WORDS = 8;

// A file of such weights.
struct neuron_repacked_file {
    std::string path;
    std::string model;  // the model that it was made from
    nk::mapping bytes;
};

// A weight in such a file.
struct neuron_repacked_weight {
    std::shared_ptr<const neuron_repacked_file> file;
    uint64_t                                    words[NEURON_REPACKED_WORDS];
    size_t                                      offset = 0;
    size_t                                      size   = 0;

    // Returns whether its type, layout and shape equal a tensor's.
    bool is_like(const ggml_tensor * t) const;

    // The digest of the bytes in ggml's order, and of the bytes in the file.
    uint64_t original() const { return words[5]; }

    uint64_t stored() const { return words[6]; }

    // Copies bytes from `at`, a multiple of 8, on, and adds them to a sum for neuron_digest_of. Returns false when the
    // file has become shorter.
    bool read(size_t at, uint8_t * to, size_t n, uint64_t & sum) const;
};

// The weights of all files, by name.
using neuron_repacked_weights = std::multimap<std::string, neuron_repacked_weight>;

// Returns the weights of all files. The first call opens the files and warns of unusable ones.
const neuron_repacked_weights & neuron_repacked_files();

// Returns the weight that was made from a tensor's bytes, for the layout of its buffer. Otherwise returns NULL and sets
// `why`.
const neuron_repacked_weight * neuron_find_repacked(const ggml_tensor * t, const uint8_t * data, std::string & why);

// Returns a digest from the sum over the words of all bytes.
uint64_t neuron_digest_of(uint64_t sum, size_t n_bytes);
