// Lookup keys: how a ggml node is turned into the words that a bundle is searched for (docs/reference/bundle-keys.md, "Key").

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

// A kernel that no op of ggml names is found by its name: the hash of `source`, the name's length and its hash.
constexpr const char * SOURCE        = "source";
constexpr uint32_t     SOURCE_FORMAT = 3;  // of the first bundles with such keys
constexpr size_t       SOURCE_WORDS  = 3;  // fewer than an op's key has

constexpr size_t MIN_SLOTS = 8;            // of a hash table

// Returns how many taken slots all searches for n keys together may pass. In a table that is at most half full each passes
// one or two. Without a limit a file made for it could keep a program busy for hours.
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

// Returns what is known about a number of `enum ggml_type`, also with one of the layouts that this library knows, or nullptr.
const type_traits * find_type(int64_t number);

// Makes the strides of dimensions with one element what they would be without gaps.
// Returns false when no tensor has this shape, which leaves `nb` in any state.
bool canonicalize(const type_traits & type, const int64_t ne[4], uint64_t nb[4]);

// Makes the key of a node; see neuron_kernels_find for the arguments. Returns false for what no kernel can be made for.
bool make_key(const char *                  op,
              const int32_t *               op_params,
              const neuron_kernels_tensor * inputs,
              size_t                        n_inputs,
              const neuron_kernels_tensor & output,
              int32_t                       alias,
              key &                         out);

// Returns what is wrong with a kernel's key as a bundle of a format has it, or nullptr. A key without mistakes is one that
// make_key makes, for a type of tensor that this library knows or for another one, or that of a graph kernel, or of a name.
const char * check_key(const uint64_t * words, size_t n_words, uint32_t format);

// Returns what is wrong with a tensor's words in a key, or nullptr.
const char * check_key_tensor(const uint64_t * words);

// Returns the first word of the keys of an op: FNV-1a of its name in lower case.
uint64_t hash_op(std::string_view name);

// Writes the key of a kernel that is found by its name.
void make_source_key(std::string_view name, uint64_t words[SOURCE_WORDS]);

// Returns the hash table of some keys, of which key i is the words from offsets[i] to offsets[i + 1]: in each slot the
// number of a key + 1, or 0 where it is empty.
//
// Throws `error` with CORRUPT when so many keys begin their search at the same slots that they can't be so by chance.
std::vector<uint32_t> make_slots(const std::vector<uint64_t> & words, const std::vector<uint32_t> & offsets);

}  // namespace nk
