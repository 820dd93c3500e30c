// Layouts of weights: other ways to store them than ggml's, which kernels ask for and buffers of a type of their own keep them in.
//
// docs/reference/bundle-keys.md describes the layouts. A unit, a row or a matrix, is stored by itself. Most layouts are permutations of its bytes;
// from the others the original can't be restored, and the buffer keeps it: originals.h.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "neuron_kernels.h"

#include <cstddef>
#include <cstdint>
#include <string>

// The layout, which no kernel has, of a view of which the bytes are not together as the view has them.
constexpr int32_t NEURON_LAYOUT_SCATTERED = NEURON_KERNELS_LAST_FORM + 1;

// What the backend's buffer types have as context.
struct neuron_buffer_type_context {
    struct ggml_backend_neuron_device_context * device = nullptr;
    int32_t                                     layout = 0;  // of the tensors whose types have it
    std::string                                 name;
};

// The get_name of the backend's buffer types, by which they are known.
const char * neuron_buffer_type_get_name(ggml_backend_buffer_type_t buft);

// Returns the layout of the tensors in buffers of a type, as far as their own types have it; 0 for ggml's order.
int32_t neuron_layout_of_buft(ggml_backend_buffer_type_t buft);

// Returns whether tensors of a type can have a layout other than 0.
bool neuron_has_layout(enum ggml_type type, int32_t layout);

// Returns whether the original can be restored from what is in a layout.
bool neuron_is_permutation(int32_t layout);

// Returns how many threads pack a weight at most: GGML_NEURON_REPACK_THREADS, or as many as the process has processors. Says once when the
// variable is not such a number.
size_t neuron_repack_threads();

// Returns the bytes of device memory that a tensor takes in buffers of a type. ggml reserves no less than its own size.
size_t neuron_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t);

// Returns a layout's name, as manifests have it.
const char * neuron_layout_name(int32_t layout);

// Returns a type without the layout that it may have.
enum ggml_type neuron_plain_type(int32_t type);

// Returns a tensor's type as the bundle library has it, with the layout that the tensor is in.
int32_t neuron_type_of(const ggml_tensor * t);

// Returns a type with a layout.
int32_t neuron_type_in_layout(enum ggml_type type, int32_t layout);

// How a tensor that is in a layout is stored.
class neuron_layout {
  public:
    // The layout of the tensor that `t` is, or is a view of.
    explicit neuron_layout(const ggml_tensor * t);

    // Returns whether the tensor has a layout.
    explicit operator bool() const { return layout != 0; }

    bool is_permutation() const { return neuron_is_permutation(layout); }

    // Bytes of a unit, a row or a matrix, as ggml has it.
    size_t unit() const { return unit_size; }

    // Bytes of a unit as it is stored.
    size_t stored_unit() const;

    // As many threads as neuron_repack_threads() says have parts of large units, or units.
    void pack(const uint8_t * from, uint8_t * to, size_t n_units) const;

    // Restores the original; of a permutation.
    void unpack(const uint8_t * from, uint8_t * to, size_t n_units) const;

  private:
    // Parts of a unit that are packed each by itself. Parts are numbered through all units.
    size_t n_parts(bool packs) const;

    void                      pack_parts(const uint8_t * from, uint8_t * to, size_t first, size_t last) const;
    template <bool PACK> void permute(const uint8_t * from, uint8_t * to, size_t first, size_t last) const;

    const ggml_tensor * root;
    int32_t             layout;
    size_t              unit_size = 0;
};
