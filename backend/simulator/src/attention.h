// Products of attention with keys and values in a cache, for the helper. They replace XLA's products, which copy the
// cache as float32 in another order.
//
// The helper registers the function with XLA as a custom call. kernelgen.simulator.attention replaces the instructions
// that compute the same by this call.

#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator {

// The numbers are the same as in kernelgen.simulator.attention.
enum class cache_type { f16, bf16, f32 };

// The operands of a product: vectors of a cache, one for each head and cell, and rows. Cell c of head h begins at element
// h * head_stride + c * cell_stride of the cache. Vectors in the update's range are read from the update.
struct cache_product {
    const uint8_t * cache;
    const uint8_t * update;        // whole vectors
    size_t          update_first;  // the element of the cache that the update begins at
    size_t          update_size;   // in elements; 0: no update
    const float *   x;             // [heads, rows, depth] for scores, [heads, rows, cells] for sums
    float *         y;             // [heads, rows, cells] for scores, [heads, rows, depth] for sums
    size_t          heads, rows, cells;
    size_t          depth;         // elements of a vector; a multiple of 16
    size_t          head_stride, cell_stride;

    // Returns the address of a vector.
    template <typename Element> const Element * at(size_t head, size_t cell) const {
        const size_t first  = head * head_stride + cell * cell_stride;
        const size_t inside = first - update_first;  // wraps around if it is before the update
        return inside < update_size ? reinterpret_cast<const Element *>(update) + inside
                                    : reinterpret_cast<const Element *>(cache) + first;
    }
};

using cache_function = void (*)(const cache_product &);

// The functions of a type: scores are products of a row and each vector; sums are weighted sums of all vectors.
struct cache_functions {
    cache_function scores, sums;
};

// Return the functions with vectors of 16 and of 8 numbers; null on processors other than x86-64. Both return the same
// bits.
cache_functions avx512_attention(cache_type type);
cache_functions avx2_attention(cache_type type);

}  // namespace simulator
