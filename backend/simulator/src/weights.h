// Products by quantized weights, for the helper: what XLA makes of the HLO that unpacks them is several times slower.
//
// The helper loads this library and gives XLA the functions as custom calls; kernelgen.simulator.weights writes these in place of the
// instructions that compute the same.

#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator {

// By the numbers that kernelgen.simulator.weights has for them.
enum class weight_type { q4_0, q4_1, q5_0, q5_1, q8_0, q2_K, q3_K, q4_K, q5_K, q6_K, iq4_nl, iq4_xs, mxfp4 };

constexpr int N_WEIGHT_TYPES = 13;

}  // namespace simulator
