// The memory of views. A view of a view refers to the tensor that owns the memory.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>

// Returns the tensor that a tensor views, or the tensor itself. `T` is `ggml_tensor`, constant or not.
template <typename T> T * neuron_root_of(T * t) {
    return t->view_src ? t->view_src : t;
}

// Returns the offset of a tensor in its root, in bytes.
inline size_t neuron_offset_of(const ggml_tensor * t) {
    return t->view_src ? t->view_offs : 0;
}

// Returns the buffer of a tensor's memory, or NULL before allocation.
inline ggml_backend_buffer * neuron_buffer_of_root(const ggml_tensor * t) {
    return neuron_root_of(t)->buffer;
}

// Returns the bytes from the beginning of a tensor's root that belong to it: a buffer may allocate more for a cache
// than requested, so that kernels for longer caches have room (ggml/buffers.h).
inline size_t neuron_room_of(const ggml_tensor * t) {
    const ggml_tensor * root = neuron_root_of(t);
    return root->buffer ? ggml_backend_buffer_get_alloc_size(root->buffer, root) : ggml_nbytes(root);
}

// The name of an op that ggml lacks: an in-place sum over as many devices as its first parameter states (ggml/chain.h).
inline constexpr char NEURON_ALL_REDUCE[] = "all_reduce";

inline bool neuron_is_all_reduce(const ggml_tensor * t) {
    return t->op == GGML_OP_CUSTOM && t->extra == NEURON_ALL_REDUCE;
}

// Returns the name of a node's op in keys.
inline const char * neuron_op_desc(const ggml_tensor * t) {
    return neuron_is_all_reduce(t) ? NEURON_ALL_REDUCE : ggml_op_desc(t);
}
