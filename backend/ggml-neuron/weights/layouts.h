// Layouts of weights: orders other than ggml's that some kernels require. Each layout has its own buffer type.
//
// docs/reference/bundle-keys.md describes the layouts. Each unit, a row or a matrix, is stored separately. Most layouts
// permute a unit's bytes. The others lose information, so the buffer keeps the original: originals.h.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "neuron_kernels.h"

#include <cstddef>
#include <cstdint>
#include <string>

// A pseudo-layout for a view whose bytes are not contiguous in the layout; no kernel has it.
constexpr int32_t NEURON_LAYOUT_SCATTERED = NEURON_KERNELS_LAST_FORM + 1;

// The context of the backend's buffer types.
struct neuron_buffer_type_context {
    struct ggml_backend_neuron_device_context * device = nullptr;
    int32_t                                     layout = 0;  // for tensors whose types allow it
    std::string                                 name;
};

// get_name of the backend's buffer types; its address identifies them.
const char * neuron_buffer_type_get_name(ggml_backend_buffer_type_t buft);

// Returns the layout of tensors in buffers of a type, for tensor types that allow it; 0 for ggml's order.
int32_t neuron_layout_of_buft(ggml_backend_buffer_type_t buft);

// Returns whether tensors of a type can have a layout other than 0.
bool neuron_has_layout(enum ggml_type type, int32_t layout);

// Returns whether a layout permits restoring the original.
bool neuron_is_permutation(int32_t layout);

// Returns the most threads that pack a weight: GGML_NEURON_REPACK_THREADS, or the number of the process's processors.
// Reports an invalid value of the variable once.
size_t neuron_repack_threads();

// Returns the bytes of device memory that a tensor takes in buffers of a type. ggml reserves at least its own size.
size_t neuron_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t);

// Returns a layout's name in manifests.
const char * neuron_layout_name(int32_t layout);

// Returns a type without its layout.
enum ggml_type neuron_plain_type(int32_t type);

// Returns a tensor's type in the bundle library's form, with the tensor's layout.
int32_t neuron_type_of(const ggml_tensor * t);

// Returns a type with a layout.
int32_t neuron_type_in_layout(enum ggml_type type, int32_t layout);

// The storage of a tensor in a layout.
class neuron_layout {
  public:
    // The layout of the tensor `t`, or of the tensor that `t` views.
    explicit neuron_layout(const ggml_tensor * t);

    // Returns whether the tensor has a layout other than ggml's.
    explicit operator bool() const { return layout != 0; }

    bool is_permutation() const { return neuron_is_permutation(layout); }

    // Bytes of a unit (a row or a matrix) in ggml's order.
    size_t unit() const { return unit_size; }

    // Bytes of a unit in the layout.
    size_t stored_unit() const;

    // Packs units. Up to neuron_repack_threads() threads share the units, or the parts of large units.
    void pack(const uint8_t * from, uint8_t * to, size_t n_units) const;

    // Restores the original; only for a permutation.
    void unpack(const uint8_t * from, uint8_t * to, size_t n_units) const;

  private:
    // Parts of a unit that are packed separately. Parts are numbered through all units.
    size_t n_parts(bool packs) const;

    void                      pack_parts(const uint8_t * from, uint8_t * to, size_t first, size_t last) const;
    template <bool PACK> void permute(const uint8_t * from, uint8_t * to, size_t first, size_t last) const;

    const ggml_tensor * root;
    int32_t             layout;
    size_t              unit_size = 0;
};
