// Buffers in device memory, and the types of them: one for all tensors, and one for each layout of weights.

#pragma once

#include "device/core.h"
#include "fallback/host_copies.h"
#include "ggml-backend-impl.h"
#include "plan/plan.h"
#include "select/tensors.h"
#include "weights/layouts.h"
#include "weights/originals.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

extern const struct ggml_backend_buffer_type_i ggml_backend_neuron_buffer_type_i;

bool ggml_backend_buft_is_neuron(ggml_backend_buffer_type_t buft);

struct neuron_buffer {
    neuron_core *   core   = nullptr;
    neuron_memory * memory = nullptr;

    // ggml computes addresses within a buffer and compares them. The buffer reserves these addresses, so that no other
    // memory has them, and protects them, so that code that takes them for host memory ends with a signal at once.
    char * base     = nullptr;
    size_t reserved = 0;

    ~neuron_buffer();

    size_t offset_of(const ggml_tensor * tensor) const { return (size_t) ((const char *) tensor->data - base); }

    // Held while a tensor in a layout is changed: what does not begin and end at its units is read first.
    std::mutex packing;

    // Of buffers for a layout that is not a permutation: the original of each tensor.
    neuron_originals originals;

    // Of buffers for a layout, what was set of whole tensors. Needs `packing`.
    struct {
        size_t      n       = 0;
        size_t      n_read  = 0;     // from files of GGML_NEURON_REPACKED
        size_t      bytes   = 0;     // as ggml has them
        size_t      taken   = 0;     // of the buffer
        double      seconds = 0;
        std::string first_not_read;  // and why
    } repacked;

    neuron_host_copies copies;
};

// Returns the bytes behind a cache that buffers have besides its own: a kernel for more cells reads on there, under a mask. A cache is taken
// for one when kernels write rows like its own and when it is not a weight; one that kernels have less than half of the cells of goes
// without.
size_t neuron_tail_of(const ggml_tensor * t);

// Reads bytes of a tensor by `read`, or takes them from a copy, which is kept of weights that are read whole more than once. `version` is
// that of the buffer's memory. Returns "" when it worked.
std::string neuron_read_or_recall(neuron_buffer &                      buffer,
                                  uint64_t                             version,
                                  const ggml_tensor *                  owner,
                                  const void *                         address,
                                  void *                               data,
                                  size_t                               size,
                                  const std::function<std::string()> & read);

// Writes bytes of a tensor that a graph computes with, which is in no layout, before the graph is computed. Returns "" when it worked, or
// is yet to be done.
std::string neuron_write_input(const ggml_tensor * tensor, const void * data, size_t offset, size_t size);

// Bytes that are brought into a layout or out of it at once, unless a unit has more: at least, and for each thread.
static constexpr size_t PACK_CHUNK            = (size_t) 4 << 20;
static constexpr size_t PACK_CHUNK_PER_THREAD = (size_t) 1 << 20;

// Where bytes of a tensor that is in a layout are.
struct neuron_packed_bytes {
    neuron_layout layout;
    size_t        begin;  // of the tensor in the buffer
    size_t        first;  // byte that is asked for, in the tensor
    size_t        last;   // behind the last such byte

    // `address` is what ggml says where the bytes are.
    neuron_packed_bytes(const char * base, const ggml_tensor * tensor, const void * address, size_t size) :
        layout(tensor) {
        const ggml_tensor * root = neuron_root_of(tensor);
        begin                    = (size_t) ((const char *) root->data - base);
        first                    = (size_t) ((const char *) address - (const char *) root->data);
        last                     = first + size;
    }

    // Where in the buffer a unit is stored that begins at a byte of the tensor.
    size_t stored_at(size_t at) const { return begin + at / layout.unit() * layout.stored_unit(); }

    // Calls use(first byte, bytes) for units in turn, from the one with the first byte to the one with the last, as long as it
    // returns "".
    template <typename F> std::string for_each_chunk(F use) const {
        const size_t unit  = layout.unit();
        const size_t bytes = std::max(PACK_CHUNK, neuron_repack_threads() * PACK_CHUNK_PER_THREAD);
        const size_t chunk = std::max(bytes / unit, (size_t) 1) * unit;
        const size_t end   = (last + unit - 1) / unit * unit;
        std::string  failure;
        for (size_t at = first / unit * unit; at < end && failure.empty(); at += chunk) {
            failure = use(at, std::min(chunk, end - at));
        }
        return failure;
    }
};

// Reads bytes of a tensor that is in a layout, as ggml has them; returns "" when it worked.
std::string neuron_read_packed(neuron_buffer &                                            buffer,
                               const neuron_packed_bytes &                                p,
                               uint8_t *                                                  data,
                               const std::function<std::string(void *, size_t, size_t)> & read);

// Ends the program when data did not get where it should be, as ggml-cuda does: ggml has no way to be told, and would go on
// with other numbers.
void neuron_require(const std::string & failure, const char * doing, const ggml_tensor * tensor);

// Returns the buffer's context when a tensor is in device memory, else NULL.
neuron_buffer * neuron_buffer_of(const ggml_tensor * tensor);

// Copies a tensor to one in a buffer, within a core. Returns false when ggml has to copy it through the host.
bool ggml_backend_neuron_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst);

// Tells the planner where a tensor is: see neuron_locate_t.
bool neuron_locate(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand);

// Returns whether the core computes with a tensor where it is: see neuron_is_on_core_t.
bool neuron_is_on_core(const neuron_core & core, const ggml_tensor * t);
