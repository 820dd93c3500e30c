// Blocks of quantized weights: their sizes and scales. The layouts are those in ggml-common.h; the numbers are those in
// kernels/dequantize.py.

#pragma once

#include "weights.h"

#include <cstring>

namespace simulator {

struct weight_block {
    int bytes;
    int elements;
};

constexpr weight_block block_of(weight_type type) {
    switch (type) {
        case weight_type::q4_0:
        case weight_type::iq4_nl:
            return { 18, 32 };
        case weight_type::q4_1:
            return { 20, 32 };
        case weight_type::q5_0:
            return { 22, 32 };
        case weight_type::q5_1:
            return { 24, 32 };
        case weight_type::q8_0:
            return { 34, 32 };
        case weight_type::mxfp4:
            return { 17, 32 };
        case weight_type::q2_K:
            return { 84, 256 };
        case weight_type::q3_K:
            return { 110, 256 };
        case weight_type::q4_K:
            return { 144, 256 };
        case weight_type::q5_K:
            return { 176, 256 };
        case weight_type::q6_K:
            return { 210, 256 };
        case weight_type::iq4_xs:
            return { 136, 256 };
        case weight_type::iq1_s:
            return { 50, 256 };
        case weight_type::iq1_m:
            return { 56, 256 };
        case weight_type::iq2_xxs:
        case weight_type::tq2_0:
            return { 66, 256 };
        case weight_type::iq2_xs:
            return { 74, 256 };
        case weight_type::iq2_s:
            return { 82, 256 };
        case weight_type::iq3_xxs:
            return { 98, 256 };
        case weight_type::iq3_s:
            return { 110, 256 };
        case weight_type::tq1_0:
            return { 54, 256 };
        case weight_type::nvfp4:
            return { 36, 64 };
        case weight_type::q1_0:
            return { 18, 128 };
        case weight_type::q2_0:
            return { 18, 64 };
    }
    return { 1, 1 };
}

// Returns whether a type's elements are points of a lattice; a block then stores the points' numbers.
constexpr bool has_lattice(weight_type type) {
    return type >= weight_type::iq1_s && type <= weight_type::iq3_s;
}

template <typename Number> inline Number number_at(const uint8_t * at) {
    Number out;
    memcpy(&out, at, sizeof(out));
    return out;
}

inline float float_of(uint32_t bits) {
    float out;
    memcpy(&out, &bits, sizeof(out));
    return out;
}

// Returns half of 2^(e - 127), as dequantize.py does.
inline float half_e8m0(uint8_t e) {
    return float_of(e < 2 ? 0x00200000U << e : (e - 1U) << 23);
}

// Returns half of an unsigned E4M3 number, as dequantize.py does.
inline float half_ue4m3(uint8_t x) {
    const uint32_t wide = x & 127;
    return x == 127 ? 0.0f : wide < 8 ? static_cast<float>(wide) * 0x1p-10f : float_of((wide << 20) + (119U << 23));
}

// The eight 6-bit scales and minima of Q4_K and Q5_K, unpacked from 12 bytes.
struct k_scales {
    uint64_t scales, minima;  // one byte each

    explicit k_scales(const uint8_t * x) {
        const auto low = number_at<uint32_t>(x), mid = number_at<uint32_t>(x + 4), high = number_at<uint32_t>(x + 8);
        const uint32_t more[2] = { (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030),
                                   (high >> 4 & 0x0f0f0f0f) | (mid >> 2 & 0x30303030) };
        scales                 = (low & 0x3f3f3f3f) | static_cast<uint64_t>(more[0]) << 32;
        minima                 = (mid & 0x3f3f3f3f) | static_cast<uint64_t>(more[1]) << 32;
    }
};

// The sixteen 6-bit scales of Q3_K, unpacked from 12 bytes: the lower four bits of eight scales, the lower four bits of
// the other eight, and four bytes with the two upper bits of each. They are 32 too large.
struct q3_scales {
    uint64_t first, last;  // one byte each

    explicit q3_scales(const uint8_t * x) {
        const auto nibbles = number_at<uint64_t>(x);
        const auto high    = number_at<uint32_t>(x + 8);
        first              = (nibbles & 0x0f0f0f0f0f0f0f0f) | twice(high << 4 & 0x30303030, high << 2 & 0x30303030);
        last               = (nibbles >> 4 & 0x0f0f0f0f0f0f0f0f) | twice(high & 0x30303030, high >> 2 & 0x30303030);
    }

  private:
    static uint64_t twice(uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; }
};

// Returns the eight 6-bit scales of IQ4_XS, unpacked from 6 bytes: first the two upper bits of each, then the lower
// four. They are 32 too large.
inline uint64_t iq4_scales(const uint8_t * x) {
    const auto high = number_at<uint16_t>(x);
    uint64_t   out  = 0;
    for (int i = 0; i < 8; i++) {
        const uint64_t scale = (x[2 + i / 2] >> 4 * (i & 1) & 15) | (high >> 2 * i & 3) << 4;
        out |= scale << 8 * i;
    }
    return out;
}

// Returns 2 x + 1 for each of eight 4-bit numbers, one per byte.
inline uint64_t odd_numbers(uint64_t bytes) {
    return (bytes & 0x0f0f0f0f0f0f0f0f) << 1 | 0x0101010101010101;
}

}  // namespace simulator
