// Forms of weights: other orders of their bytes than ggml's, which kernels ask for and buffers of a type of their own keep them in.
//
// docs/bundle-format.md describes the forms. A form is a permutation of bytes inside of units: rows or matrices.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "neuron_kernels.h"

#include <cstddef>
#include <cstdint>
#include <string>

// The form, which no kernel has, of a view of which the bytes are not together as the view has them.
constexpr int32_t NEURON_FORM_SCATTERED = NEURON_KERNELS_LAST_FORM + 1;

// What the backend's buffer types have as context.
struct neuron_buffer_type_context {
    struct ggml_backend_neuron_device_context * device = nullptr;
    int32_t                                     form   = 0;  // of the tensors whose types have it
    std::string                                 name;
};

// The get_name of the backend's buffer types, by which they are known.
const char * neuron_buffer_type_get_name(ggml_backend_buffer_type_t buft);

// Returns the form of the tensors in buffers of a type, as far as their own types have it; 0 for ggml's order.
int32_t neuron_form_of_buft(ggml_backend_buffer_type_t buft);

// Returns the form that tensors of a type can have, or 0.
int32_t neuron_form_of_type(enum ggml_type type);

// Returns a form's name, as manifests have it.
const char * neuron_form_name(int32_t form);

// Returns a type without the form that it may have.
enum ggml_type neuron_plain_type(int32_t type);

// Returns a tensor's type as the bundle library has it, with the form that the tensor is in.
int32_t neuron_type_of(const ggml_tensor * t);

// Returns a type with a form.
int32_t neuron_type_in_form(enum ggml_type type, int32_t form);

// How the bytes of a tensor that is in a form are between ggml's order and its own.
class neuron_form {
  public:
    // The form of the tensor that `t` is, or is a view of.
    explicit neuron_form(const ggml_tensor * t);

    // Returns whether the tensor has a form.
    explicit operator bool() const { return form != 0; }

    // Bytes that change places only among themselves: a row, or a matrix.
    size_t unit() const { return unit_size; }

    void pack(const uint8_t * from, uint8_t * to, size_t n_units) const;
    void unpack(const uint8_t * from, uint8_t * to, size_t n_units) const;

  private:
    template <bool PACK> void permute(const uint8_t * from, uint8_t * to, size_t n_units) const;

    const ggml_tensor * root;
    int32_t             form;
    size_t              unit_size = 0;
};
