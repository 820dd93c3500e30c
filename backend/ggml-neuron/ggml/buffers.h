// Buffers in device memory and their types: one for all tensors, and one for each layout of weights.

#pragma once

#include "device/core.h"
#include "fallback/host_copies.h"
#include "ggml-backend-impl.h"
#include "plan/plan.h"
#include "select/tensors.h"
#include "weights/layouts.h"
#include "weights/originals.h"

#include <algorithm>
#include <atomic>
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

    // ggml computes and compares addresses within a buffer. The buffer reserves these addresses, so that no other
    // memory has them, and protects them, so that a program that accesses them as host memory gets a signal at once.
    char * base     = nullptr;
    size_t reserved = 0;

    ~neuron_buffer();

    size_t offset_of(const ggml_tensor * tensor) const { return (size_t) ((const char *) tensor->data - base); }

    // Locked while a tensor in a layout changes: units that a write covers partly are read first.
    std::mutex packing;

    // For layouts that are not permutations: the original of each tensor.
    neuron_originals originals;

    // For layouts: totals of the writes of whole tensors. `packing` guards it.
    struct {
        size_t      n       = 0;
        size_t      n_read  = 0;     // from files of GGML_NEURON_REPACKED
        size_t      bytes   = 0;     // in ggml's layout
        size_t      taken   = 0;     // in the buffer
        double      seconds = 0;
        std::string first_not_read;  // with the reason
    } repacked;

    neuron_host_copies copies;

    // Whether a graph was planned with a tensor of it, or a tensor was read.
    std::atomic<bool> used{ false };
};

// Returns the bytes that a buffer adds behind a cache: a kernel for more cells reads on there, under a mask. A tensor
// counts as a cache if kernels write rows like its own and it is not a weight. A cache gets none if the kernels have
// less than half of its cells.
size_t neuron_tail_of(const ggml_tensor * t);

// Reads bytes of a tensor with `read`, or copies them from a host copy, which is kept for weights that are read whole
// more than once. `version` is the version of the buffer's memory. Returns "" on success.
std::string neuron_read_or_recall(neuron_buffer &                      buffer,
                                  uint64_t                             version,
                                  const ggml_tensor *                  owner,
                                  const void *                         address,
                                  void *                               data,
                                  size_t                               size,
                                  const std::function<std::string()> & read);

// Writes bytes of a graph's input, which has no layout, before the graph is computed. The write may be deferred.
// Returns "", or the failure so far.
std::string neuron_write_input(const ggml_tensor * tensor, const void * data, size_t offset, size_t size);

// The least bytes, in total and per thread, that are packed or unpacked at once. A larger unit is one chunk.
static constexpr size_t PACK_CHUNK            = (size_t) 4 << 20;
static constexpr size_t PACK_CHUNK_PER_THREAD = (size_t) 1 << 20;

// The place of a range of bytes of a tensor in a layout.
struct neuron_packed_bytes {
    neuron_layout layout;
    size_t        begin;  // first byte of the tensor in the buffer
    size_t        first;  // first requested byte, in the tensor
    size_t        last;   // end of the requested bytes

    // `address` is ggml's address of the bytes.
    neuron_packed_bytes(const char * base, const ggml_tensor * tensor, const void * address, size_t size) :
        layout(tensor) {
        const ggml_tensor * root = neuron_root_of(tensor);
        begin                    = (size_t) ((const char *) root->data - base);
        first                    = (size_t) ((const char *) address - (const char *) root->data);
        last                     = first + size;
    }

    // Returns the place in the buffer of the unit that begins at byte `at` of the tensor.
    size_t stored_at(size_t at) const { return begin + at / layout.unit() * layout.stored_unit(); }

    // Calls use(first byte, bytes) for consecutive units, from the first requested byte's to the last one's, until it
    // returns a failure.
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

// Reads bytes of a tensor in a layout, and returns them in ggml's layout. Returns "" on success.
std::string neuron_read_packed(neuron_buffer &                                            buffer,
                               const neuron_packed_bytes &                                p,
                               uint8_t *                                                  data,
                               const std::function<std::string(void *, size_t, size_t)> & read);

// Ends the program on a failed transfer, as ggml-cuda does: ggml has no way to report it, and would continue with wrong
// numbers.
void neuron_require(const std::string & failure, const char * doing, const ggml_tensor * tensor);

// Returns the buffer's context for a tensor in device memory, else NULL.
neuron_buffer * neuron_buffer_of(const ggml_tensor * tensor);

// Copies a tensor to one in a buffer, within a core. Returns false when ggml must copy it through the host.
bool ggml_backend_neuron_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst);

// Returns the place of a tensor to the planner: see neuron_locate_t.
bool neuron_locate(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand);

// Returns whether the core can use a tensor in place: see neuron_is_on_core_t.
bool neuron_is_on_core(const neuron_core & core, const ggml_tensor * t);
