// An open bundle, and the functions that read one from a pack.

#pragma once

#include "mapping.h"
#include "neuron_kernels.h"
#include "sha256.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// Every function reads `table`. For an embedded bundle it points into the program. For a pack it points into the
// members below it, except for the NEFFs, which stay in the file.
struct neuron_kernels {
    neuron_kernels_table table = {};

    nk::mapping           file;  // a pack
    std::string           name;
    std::string           target;
    std::string           compiler;
    std::string           flags;
    std::string           version;
    std::string           jax_version;
    std::string           ids;
    std::string           hlo_sha256;
    std::string           neff_sha256;  // 64 digits and a NUL for each NEFF
    std::vector<uint32_t> id_offsets;
    std::vector<uint32_t> kernel_neff;
    std::vector<uint64_t> key_words;
    std::vector<uint32_t> key_offsets;
    std::vector<uint32_t> slots;
    std::vector<uint64_t> neff_offsets;
    std::vector<uint64_t> neff_sizes;
    std::vector<uint64_t> neff_memory;  // empty when the bundle holds none

    // For each NEFF, the state of `file` in which its SHA-256 was right: each core reads it, and hashing takes longer.
    std::unique_ptr<std::atomic<int64_t>[]> verified;

    // Fills the table from the members and the arguments.
    //
    // Throws `error` with CORRUPT when two kernels have the same key, and when lnc is 0.
    void make_table(bool simulated, uint32_t lnc, const uint8_t * neff_data);
};

namespace nk {

constexpr size_t ALIGNMENT = 64;  // for each NEFF in a bundle

// Throws `error` with VERSION when this library does not read bundles of this format; the message begins with `what`.
void check_format(const char * what, uint64_t format);

bool is_kernel_id(std::string_view text);

// Returns a text of the bundle. Throws `error` with CORRUPT when it has control characters.
std::string_view check_text(const char * what, std::string_view text);

// Returns whether a text is a SHA-256 in lower-case hexadecimal digits.
bool is_sha256(std::string_view text);

// Returns the kernel with this key, or NEURON_KERNELS_NOT_FOUND.
int32_t find_key(const neuron_kernels_table & table, const uint64_t * words, size_t n_words);

// Reads a pack whose bytes outlive the bundle.
//
// Throws `error`: NOT_A_PACK, VERSION or CORRUPT.
void read_pack(const uint8_t * data, size_t size, neuron_kernels & bundle);

}  // namespace nk
