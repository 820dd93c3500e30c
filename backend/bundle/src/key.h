// Lookup keys: the words that identify a ggml node in a bundle (docs/reference/bundle-keys.md, "Key").

#pragma once

#include "neuron_kernels.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace nk {

constexpr size_t TENSOR_WORDS = 9;
constexpr size_t PARAM_WORDS  = NEURON_KERNELS_N_OP_PARAMS / 2;
constexpr size_t MAX_WORDS    = 2 + TENSOR_WORDS * (NEURON_KERNELS_MAX_INPUTS + 1) + PARAM_WORDS;

constexpr uint64_t ABSENT_WORD = 0xFFFFFFFFFFFFFFFF;

// A kernel without an op of ggml is found by its name. Its key: the hash of `source`, the name's length and the name's
// hash.
constexpr const char * SOURCE       = "source";
constexpr size_t       SOURCE_WORDS = 3;  // fewer than in an op's key

constexpr size_t MIN_SLOTS = 8;           // slots of a hash table

// Returns how many taken slots the searches for all n keys together may pass. In a table that is at most half full each
// search passes one or two. Without a limit a crafted file could keep a program busy for hours.
constexpr uint64_t max_steps(uint64_t n_keys) {
    return 64 * n_keys + 4096;
}

struct key {
    uint64_t words[MAX_WORDS];
    size_t   n_words;
};

struct type_traits {
    uint32_t block;  // elements per block; 1 when the type is not quantized
    uint32_t size;   // bytes per block
};

// Returns the traits of a number of `enum ggml_type`, with or without one of this library's layouts, or nullptr.
const type_traits * find_type(int64_t number);

// Sets the strides of dimensions with one element to their values in a tensor without gaps. Returns false, with `nb` in
// any state, when no tensor has this shape.
bool canonicalize(const type_traits & type, const int64_t ne[4], uint64_t nb[4]);

// Makes the key of a node; neuron_kernels_find describes the arguments. Returns false for a node that no kernel can
// compute.
bool make_key(const char *                  op,
              const int32_t *               op_params,
              const neuron_kernels_tensor * inputs,
              size_t                        n_inputs,
              const neuron_kernels_tensor & output,
              int32_t                       alias,
              key &                         out);

// Returns the mistake in a kernel's key, or nullptr. A valid key is one that make_key makes (for a known or an unknown
// tensor type), a graph kernel's key, or a name's key.
const char * check_key(const uint64_t * words, size_t n_words);

// Returns the mistake in a tensor's words in a key, or nullptr.
const char * check_key_tensor(const uint64_t * words);

// Returns the first word of an op's keys: FNV-1a of its name in lower case.
uint64_t hash_op(std::string_view name);

// Writes the key of a kernel that has a name instead of an op.
void make_source_key(std::string_view name, uint64_t words[SOURCE_WORDS]);

// Returns the hash table of some keys. Key i is the words from offsets[i] to offsets[i + 1]. Each slot holds the number
// of a key + 1, or 0 when it is empty.
//
// Throws `error` with CORRUPT when more keys begin their search at the same slots than chance allows.
std::vector<uint32_t> make_slots(const std::vector<uint64_t> & words, const std::vector<uint32_t> & offsets);

}  // namespace nk
