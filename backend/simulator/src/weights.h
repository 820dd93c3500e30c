// Products by quantized weights, for the helper. XLA's code for the HLO that unpacks weights is several times slower.
//
// The helper loads this library and registers the functions with XLA as custom calls. kernelgen.simulator.weights
// replaces the instructions that compute the same by these calls.

#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator {

// The numbers are the same as in kernelgen.simulator.weights.
enum class weight_type {
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q8_0,
    q2_K,
    q3_K,
    q4_K,
    q5_K,
    q6_K,
    iq4_nl,
    iq4_xs,
    mxfp4,
    iq1_s,
    iq1_m,
    iq2_xxs,
    iq2_xs,
    iq2_s,
    iq3_xxs,
    iq3_s,
    tq1_0,
    tq2_0,
    nvfp4,
    q1_0,
    q2_0,
};

// A product that a call computes.
struct weight_product {
    const uint8_t * weights;  // [m, blocks of a row, bytes of a block]
    const float *   x;        // [n, k]
    float *         y;        // [n, m]
    size_t          m, k, n;
    const uint32_t *
        lattice;  // for types with a lattice, else null: for each point, the code of element i, from bit 4 i on
};

// Computes the rows of the result from the first number up to (not including) the second.
using weight_function = void (*)(const weight_product &, size_t, size_t);

// Return the function of a type, for vectors of 16 and of 8 numbers; null on processors other than x86-64. Both compute
// the same bits.
weight_function avx512_function(weight_type type);
weight_function avx2_function(weight_type type);

}  // namespace simulator
