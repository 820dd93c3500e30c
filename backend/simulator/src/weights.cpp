#include "weights.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

// In each function here a product's terms are those of the HLO that it stands for (kernels/dequantize.py): each element is computed in
// float32 by the same operations, and rounded to bfloat16 where the HLO does that. Only the order of sums is free. The compiler must not
// fuse a multiplication and an addition: the element would be another one.

#if defined(__x86_64__)
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC's own header: it means what nothing reads
#    endif
#    include <immintrin.h>
#    define HAS_AVX512    1
#    define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#    define TARGET_AVX2   __attribute__((target("avx2,fma,f16c")))
#else
#    define HAS_AVX512 0
#endif

namespace simulator {

// ---- numbers -----------------------------------------------------------------------------------------------------------

static inline float float_of(uint32_t bits) {
    float out;
    memcpy(&out, &bits, sizeof(out));
    return out;
}

static inline uint32_t bits_of(float x) {
    uint32_t out;
    memcpy(&out, &x, sizeof(out));
    return out;
}

// IEEE half precision. A NaN becomes the one whose lower bits are zero, so that what rounds it need not look for NaNs.
static inline float half(const uint8_t * at) {
    const uint32_t bits     = at[0] | static_cast<uint32_t>(at[1]) << 8;
    const uint32_t sign     = (bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 31;
    const uint32_t fraction = bits & 1023;
    if (exponent == 31) {
        return float_of(sign | (fraction != 0 ? 0x7fc00000 : 0x7f800000));
    }
    if (exponent == 0) {
        const float small = static_cast<float>(fraction) * (1.0f / (1 << 24));
        return sign != 0 ? -small : small;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// Half of 2^(e - 127), as in dequantize.py.
static inline float e8m0(uint8_t e) {
    return float_of(e < 2 ? 0x00200000U << e : (e - 1U) << 23);
}

// To the nearest bfloat16, to even ones.
static inline float rounded(float x) {
    const uint32_t bits = bits_of(x);
    return float_of((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000U);
}

static const int8_t IQ4_NL[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
static const int8_t E2M1[16]   = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

struct format {
    int bytes;     // of a block
    int elements;  // of a block
};

static constexpr format FORMATS[] = {
    { 18,  32  }, // q4_0
    { 20,  32  }, // q4_1
    { 22,  32  }, // q5_0
    { 24,  32  }, // q5_1
    { 34,  32  }, // q8_0
    { 84,  256 }, // q2_K
    { 110, 256 }, // q3_K
    { 144, 256 }, // q4_K
    { 176, 256 }, // q5_K
    { 210, 256 }, // q6_K
    { 18,  32  }, // iq4_nl
    { 136, 256 }, // iq4_xs
    { 17,  32  }, // mxfp4
};

static_assert(sizeof(FORMATS) / sizeof(*FORMATS) == N_WEIGHT_TYPES, "a format for each type");

// ---- what makes the elements of blocks, for any processor ------------------------------------------------------------------

static inline uint32_t word(const uint8_t * at) {
    return at[0] | static_cast<uint32_t>(at[1]) << 8 | static_cast<uint32_t>(at[2]) << 16 |
           static_cast<uint32_t>(at[3]) << 24;
}

// Scales and minima of Q4_K and Q5_K, from byte 4 of a block.
static inline void k_scales(const uint8_t * x, uint8_t * scale, uint8_t * minimum) {
    for (int i = 0; i < 4; i++) {
        const uint8_t low = x[i], mid = x[4 + i], high = x[8 + i];
        scale[i]       = low & 63;
        scale[4 + i]   = static_cast<uint8_t>((high & 15) | (low >> 6) << 4);
        minimum[i]     = mid & 63;
        minimum[4 + i] = static_cast<uint8_t>((high >> 4) | (mid >> 6) << 4);
    }
}

// Sixteen scales of Q3_K, from byte 96 of a block; 32 too large.
static inline void q3_scales(const uint8_t * x, uint8_t * scale) {
    for (int i = 0; i < 16; i++) {
        const int low  = i < 8 ? x[i] & 15 : x[i - 8] >> 4;
        const int high = (x[8 + (i & 3)] >> 2 * (i >> 2)) & 3;
        scale[i]       = static_cast<uint8_t>(low | high << 4);
    }
}

// Eight scales of IQ4_XS; 32 too large.
static inline void iq4_scales(const uint8_t * x, uint8_t * scale) {
    const int high = x[2] | x[3] << 8;
    for (int i = 0; i < 8; i++) {
        const int low = (x[4 + i / 2] >> 4 * (i & 1)) & 15;
        scale[i]      = static_cast<uint8_t>(low | ((high >> 2 * i) & 3) << 4);
    }
}

// The elements of a block, not rounded yet. `type` is a constant wherever it is called.
static inline __attribute__((always_inline)) void unpack_block(weight_type type, const uint8_t * x, float * y) {
    uint8_t     scale[16], minimum[16];
    const float d = half(x);
    switch (type) {
        case weight_type::q4_0:
            for (int i = 0; i < 16; i++) {
                y[i]      = static_cast<float>((x[2 + i] & 15) - 8) * d;
                y[16 + i] = static_cast<float>((x[2 + i] >> 4) - 8) * d;
            }
            break;
        case weight_type::q4_1: {
            const float m = half(x + 2);
            for (int i = 0; i < 16; i++) {
                y[i]      = static_cast<float>(x[4 + i] & 15) * d + m;
                y[16 + i] = static_cast<float>(x[4 + i] >> 4) * d + m;
            }
            break;
        }
        case weight_type::q5_0:
        case weight_type::q5_1: {
            const bool      one  = type == weight_type::q5_1;
            const uint32_t  high = word(x + (one ? 4 : 2));
            const uint8_t * low  = x + (one ? 8 : 6);
            const float     m    = one ? half(x + 2) : 0;
            for (int i = 0; i < 32; i++) {
                const int nibble = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
                const int q      = nibble | static_cast<int>(high >> i & 1) << 4;
                y[i]             = one ? static_cast<float>(q) * d + m : static_cast<float>(q - 16) * d;
            }
            break;
        }
        case weight_type::q8_0:
            for (int i = 0; i < 32; i++) {
                y[i] = static_cast<float>(static_cast<int8_t>(x[2 + i])) * d;
            }
            break;
        case weight_type::q2_K: {
            const float a = half(x + 80), b = half(x + 82);
            for (int i = 0; i < 256; i += 16) {
                const float     s = a * static_cast<float>(x[i / 16] & 15), m = b * static_cast<float>(x[i / 16] >> 4);
                const uint8_t * q = x + 16 + i / 128 * 32 + i % 32;
                for (int j = 0; j < 16; j++) {
                    y[i + j] = static_cast<float>((q[j] >> 2 * (i / 32 % 4)) & 3) * s - m;
                }
            }
            break;
        }
        case weight_type::q3_K: {
            const float a = half(x + 108);
            q3_scales(x + 96, scale);
            for (int i = 0; i < 256; i += 16) {
                const float    s   = a * static_cast<float>(scale[i / 16] - 32);
                const uint8_t *low = x + 32 + i / 128 * 32 + i % 32, *high = x + i % 32;
                for (int j = 0; j < 16; j++) {
                    const int q = ((low[j] >> 2 * (i / 32 % 4)) & 3) | ((high[j] >> (i / 32)) & 1) << 2;
                    y[i + j]    = static_cast<float>(q - 4) * s;
                }
            }
            break;
        }
        case weight_type::q4_K:
        case weight_type::q5_K: {
            const bool  five = type == weight_type::q5_K;
            const float dmin = half(x + 2);
            k_scales(x + 4, scale, minimum);
            for (int i = 0; i < 256; i += 32) {
                const float s = d * static_cast<float>(scale[i / 32]), m = dmin * static_cast<float>(minimum[i / 32]);
                const uint8_t * low = x + (five ? 48 : 16) + i / 64 * 32;
                for (int j = 0; j < 32; j++) {
                    const int high = five ? ((x[16 + j] >> (i / 32)) & 1) << 4 : 0;
                    y[i + j]       = static_cast<float>(((low[j] >> 4 * (i / 32 % 2)) & 15) | high) * s - m;
                }
            }
            break;
        }
        case weight_type::q6_K: {
            const float a = half(x + 208);
            for (int i = 0; i < 256; i += 16) {
                const float    s   = a * static_cast<float>(static_cast<int8_t>(x[192 + i / 16]));
                const uint8_t *low = x + i / 128 * 64 + i % 64, *high = x + 128 + i / 128 * 32 + i % 32;
                for (int j = 0; j < 16; j++) {
                    const int q = ((low[j] >> 4 * (i / 64 % 2)) & 15) | ((high[j] >> 2 * (i / 32 % 4)) & 3) << 4;
                    y[i + j]    = static_cast<float>(q - 32) * s;
                }
            }
            break;
        }
        case weight_type::iq4_nl:
            for (int i = 0; i < 16; i++) {
                y[i]      = static_cast<float>(IQ4_NL[x[2 + i] & 15]) * d;
                y[16 + i] = static_cast<float>(IQ4_NL[x[2 + i] >> 4]) * d;
            }
            break;
        case weight_type::iq4_xs:
            iq4_scales(x, scale);
            for (int i = 0; i < 256; i += 32) {
                const float s = d * static_cast<float>(scale[i / 32] - 32);
                for (int j = 0; j < 32; j++) {
                    y[i + j] = static_cast<float>(IQ4_NL[(x[8 + i / 2 + j % 16] >> 4 * (j / 16)) & 15]) * s;
                }
            }
            break;
        case weight_type::mxfp4:
            for (int i = 0; i < 16; i++) {
                y[i]      = static_cast<float>(E2M1[x[1 + i] & 15]) * e8m0(x[0]);
                y[16 + i] = static_cast<float>(E2M1[x[1 + i] >> 4]) * e8m0(x[0]);
            }
            break;
    }
}

// What a call computes, of certain rows of the matrix.
struct task {
    const uint8_t * weights;  // [m, blocks of a row, bytes of a block]
    const float *   x;        // [n, k]
    float *         y;        // [n, m]
    size_t          m, k, n;
};

static inline float product(const float * a, const float * b, size_t k) {
    float sum[16] = {};
    for (size_t i = 0; i < k; i += 16) {
        for (size_t j = 0; j < 16; j++) {
            sum[j] += a[i + j] * b[i + j];
        }
    }
    float out = 0;
    for (const float s : sum) {
        out += s;
    }
    return out;
}

static size_t row_bytes(weight_type type, size_t k) {
    const format f = FORMATS[static_cast<int>(type)];
    return k / static_cast<size_t>(f.elements) * static_cast<size_t>(f.bytes);
}

template <weight_type Type> static void product_any(const task & t, size_t begin, size_t end) {
    constexpr format   F = FORMATS[static_cast<int>(Type)];
    std::vector<float> elements(t.k);
    for (size_t row = begin; row < end; row++) {
        const uint8_t * w = t.weights + row * row_bytes(Type, t.k);
        for (size_t i = 0; i < t.k; i += F.elements, w += F.bytes) {
            unpack_block(Type, w, elements.data() + i);
        }
        for (float & x : elements) {
            x = rounded(x);
        }
        for (size_t i = 0; i < t.n; i++) {
            t.y[i * t.m + row] = product(elements.data(), t.x + i * t.k, t.k);
        }
    }
}

// ---- the same with AVX-512: 16 elements at a time, given to a function with the number of the first ---------------------------

#if HAS_AVX512

#    define INLINE512 TARGET_AVX512 inline __attribute__((always_inline))

INLINE512 static __m512 rounded512(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd  = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum  = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}

INLINE512 static __m512i bytes512(const uint8_t * at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

INLINE512 static __m512 signed512(const int8_t * at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))));
}

INLINE512 static __m512 numbers512(int first) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                               _mm512_set1_epi32(first)));
}

INLINE512 static float half512(const uint8_t * at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    if (__builtin_expect((bits & 0x7c00) == 0x7c00, 0)) {
        return half(at);
    }
    return _cvtsh_ss(bits);
}

INLINE512 static __m512 times(__m512 x, float y) {
    return _mm512_mul_ps(x, _mm512_set1_ps(y));
}

// Four bits of an element choose one of the 16 values that it may have: these are computed and rounded once for all elements that share
// a scale.
INLINE512 static __m512 chosen(__m512 values, __m512i code) {
    return _mm512_permutexvar_ps(code, values);
}

template <typename Use>
INLINE512 static void nibbles512(const uint8_t * at, __m512 values, int first, int second, Use & use) {
    const __m512i q = bytes512(at);
    use(first, chosen(values, q));
    use(second, chosen(values, _mm512_srli_epi32(q, 4)));
}

// Five bits: one of the values of two registers.
template <typename Use>
INLINE512 static void five512(__m512i   nibble,
                              __mmask16 high,
                              __m512    low_values,
                              __m512    high_values,
                              int       first,
                              Use &     use) {
    const __m512 a = _mm512_permutexvar_ps(nibble, low_values);
    use(first, _mm512_mask_permutexvar_ps(a, high, nibble, high_values));
}

template <weight_type Type, typename Use> INLINE512 static void unpack512(const uint8_t * x, Use & use) {
    uint8_t scale[16], minimum[16];
    (void) scale;
    (void) minimum;
    switch (Type) {
        case weight_type::q4_0:
            nibbles512(x + 2, rounded512(times(numbers512(-8), half512(x))), 0, 16, use);
            break;
        case weight_type::q4_1: {
            const __m512 values = _mm512_add_ps(times(numbers512(0), half512(x)), _mm512_set1_ps(half512(x + 2)));
            nibbles512(x + 4, rounded512(values), 0, 16, use);
            break;
        }
        case weight_type::q5_0:
        case weight_type::q5_1: {
            constexpr bool one  = Type == weight_type::q5_1;
            const float    d    = half512(x);
            const uint32_t high = word(x + (one ? 4 : 2));
            __m512 low_values = times(numbers512(one ? 0 : -16), d), high_values = times(numbers512(one ? 16 : 0), d);
            if (one) {
                const __m512 m = _mm512_set1_ps(half512(x + 2));
                low_values     = _mm512_add_ps(low_values, m);
                high_values    = _mm512_add_ps(high_values, m);
            }
            low_values      = rounded512(low_values);
            high_values     = rounded512(high_values);
            const __m512i q = bytes512(x + (one ? 8 : 6));
            five512(q, static_cast<__mmask16>(high), low_values, high_values, 0, use);
            five512(_mm512_srli_epi32(q, 4), static_cast<__mmask16>(high >> 16), low_values, high_values, 16, use);
            break;
        }
        case weight_type::q8_0: {
            const __m512 d = _mm512_set1_ps(half512(x));
            for (int i = 0; i < 32; i += 16) {
                use(i, rounded512(_mm512_mul_ps(signed512(reinterpret_cast<const int8_t *>(x + 2 + i)), d)));
            }
            break;
        }
        case weight_type::q2_K: {
            const float       d = half512(x + 80), dmin = half512(x + 82);
            const __m512i     s = bytes512(x);
            // Lane i: of elements 16 i to 16 i + 15.
            alignas(64) float scales[16], minima[16];
            _mm512_store_ps(scales, times(_mm512_cvtepi32_ps(_mm512_and_si512(s, _mm512_set1_epi32(15))), d));
            _mm512_store_ps(minima, times(_mm512_cvtepi32_ps(_mm512_srli_epi32(s, 4)), dmin));
            for (int i = 0; i < 256; i += 128) {
                for (int j = 0; j < 32; j += 16) {
                    __m512i q = bytes512(x + 16 + i / 4 + j);
                    for (int k = 0; k < 128; k += 32) {
                        const int    at = i + k + j;
                        const __m512 y  = _mm512_sub_ps(
                            times(_mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(3))), scales[at / 16]),
                            _mm512_set1_ps(minima[at / 16]));
                        use(at, rounded512(y));
                        q = _mm512_srli_epi32(q, 2);
                    }
                }
            }
            break;
        }
        case weight_type::q3_K: {
            q3_scales(x + 96, scale);
            alignas(64) float scales[16];
            _mm512_store_ps(scales, times(_mm512_cvtepi32_ps(_mm512_sub_epi32(bytes512(scale), _mm512_set1_epi32(32))),
                                          half512(x + 108)));
            for (int j = 0; j < 32; j += 16) {
                __m512i high = bytes512(x + j);
                for (int i = 0; i < 256; i += 128) {
                    __m512i low = bytes512(x + 32 + i / 4 + j);
                    for (int k = 0; k < 128; k += 32) {
                        const int     at = i + k + j;
                        const __m512i h  = _mm512_slli_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), 2);
                        const __m512i q  = _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(3)), h);
                        const __m512  y  = _mm512_cvtepi32_ps(_mm512_sub_epi32(q, _mm512_set1_epi32(4)));
                        use(at, rounded512(times(y, scales[at / 16])));
                        low  = _mm512_srli_epi32(low, 2);
                        high = _mm512_srli_epi32(high, 1);
                    }
                }
            }
            break;
        }
        case weight_type::q4_K:
        case weight_type::q5_K: {
            constexpr bool five = Type == weight_type::q5_K;
            const float    d = half512(x), dmin = half512(x + 2);
            k_scales(x + 4, scale, minimum);
            const uint8_t * low = x + (five ? 48 : 16);
            for (int i = 0; i < 256; i += 32) {
                const float  s           = d * static_cast<float>(scale[i / 32]);
                const __m512 m           = _mm512_set1_ps(dmin * static_cast<float>(minimum[i / 32]));
                const __m512 low_values  = rounded512(_mm512_sub_ps(times(numbers512(0), s), m));
                const __m512 high_values = five ? rounded512(_mm512_sub_ps(times(numbers512(16), s), m)) : low_values;
                for (int j = 0; j < 32; j += 16) {
                    __m512i q = bytes512(low + i / 64 * 32 + j);
                    if (i % 64 != 0) {
                        q = _mm512_srli_epi32(q, 4);
                    }
                    if (five) {
                        const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 16 + j));
                        five512(q, _mm_test_epi8_mask(h, _mm_set1_epi8(static_cast<char>(1 << i / 32))), low_values,
                                high_values, i + j, use);
                    } else {
                        use(i + j, chosen(low_values, q));
                    }
                }
            }
            break;
        }
        case weight_type::q6_K: {
            alignas(64) float scales[16];
            _mm512_store_ps(scales, times(signed512(reinterpret_cast<const int8_t *>(x + 192)), half512(x + 208)));
            for (int i = 0; i < 256; i += 128) {
                for (int j = 0; j < 32; j += 16) {
                    __m512i       high   = bytes512(x + 128 + i / 4 + j);
                    const __m512i low[2] = { bytes512(x + i / 2 + j), bytes512(x + i / 2 + 32 + j) };
                    for (int k = 0; k < 4; k++) {
                        const int     at = i + 32 * k + j;
                        const __m512i nibble =
                            k < 2 ? _mm512_and_si512(low[k], _mm512_set1_epi32(15)) : _mm512_srli_epi32(low[k - 2], 4);
                        const __m512i h = _mm512_slli_epi32(_mm512_and_si512(high, _mm512_set1_epi32(3)), 4);
                        const __m512  y =
                            _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_or_si512(nibble, h), _mm512_set1_epi32(32)));
                        use(at, rounded512(times(y, scales[at / 16])));
                        high = _mm512_srli_epi32(high, 2);
                    }
                }
            }
            break;
        }
        case weight_type::iq4_nl:
            nibbles512(x + 2, rounded512(times(signed512(IQ4_NL), half512(x))), 0, 16, use);
            break;
        case weight_type::iq4_xs: {
            const float  d      = half512(x);
            const __m512 values = signed512(IQ4_NL);
            iq4_scales(x, scale);
            for (int i = 0; i < 8; i++) {
                const float s = d * static_cast<float>(scale[i] - 32);
                nibbles512(x + 8 + 16 * i, rounded512(times(values, s)), 32 * i, 32 * i + 16, use);
            }
            break;
        }
        case weight_type::mxfp4:
            nibbles512(x + 1, rounded512(times(signed512(E2M1), e8m0(x[0]))), 0, 16, use);
            break;
    }
}

INLINE512 static float added(__m512 x) {
    alignas(64) float part[16];
    _mm512_store_ps(part, x);
    for (int n = 8; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            part[i] += part[n + i];
        }
    }
    return part[0];
}

// Adds up products of a row of the matrix and N rows of `x`.
template <int N> struct sums512 {
    const float * x;  // of the block's first element
    size_t        k;  // from one row to the next
    __m512        sum[N][2];

    INLINE512 void operator()(int first, __m512 w) {
        for (int i = 0; i < N; i++) {
            __m512 & s = sum[i][first / 16 % 2];
            s          = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + static_cast<size_t>(i) * k + first), s);
        }
    }
};

template <weight_type Type, int N>
TARGET_AVX512 static void products512(const task & t, size_t first_x, size_t begin, size_t end) {
    constexpr format F      = FORMATS[static_cast<int>(Type)];
    const size_t     blocks = t.k / F.elements;
    for (size_t row = begin; row < end; row++) {
        const uint8_t * w = t.weights + row * blocks * F.bytes;
        sums512<N>      sums;
        sums.x = t.x + first_x * t.k;
        sums.k = t.k;
        for (auto & both : sums.sum) {
            both[0] = both[1] = _mm512_setzero_ps();
        }
        for (size_t b = 0; b < blocks; b++, w += F.bytes, sums.x += F.elements) {
            unpack512<Type>(w, sums);
        }
        for (int i = 0; i < N; i++) {
            t.y[(first_x + i) * t.m + row] = added(_mm512_add_ps(sums.sum[i][0], sums.sum[i][1]));
        }
    }
}

template <weight_type Type> TARGET_AVX512 static void product512(const task & t, size_t begin, size_t end) {
    size_t i = 0;
    for (; i + 4 <= t.n; i += 4) {
        products512<Type, 4>(t, i, begin, end);
    }
    for (; i + 2 <= t.n; i += 2) {
        products512<Type, 2>(t, i, begin, end);
    }
    if (i < t.n) {
        products512<Type, 1>(t, i, begin, end);
    }
}

#endif  // HAS_AVX512

// ---- threads ---------------------------------------------------------------------------------------------------------------

using function = void (*)(const task &, size_t, size_t);

// Threads that live as long as the process, as many as XLA's with the one that calls. Each takes the next rows of a call until there are
// none; several calls are done one after the other.
class thread_pool {
  public:
    explicit thread_pool(size_t threads) {
        for (size_t i = 1; i < threads; i++) {
            std::thread([this] { work(); }).detach();
        }
        others_ = threads > 0 ? threads - 1 : 0;
    }

    void run(function f, const task & t) {
        // With less than some 100 µs a thread would come too late.
        if (others_ == 0 || t.m * t.k * std::max<size_t>(t.n, 1) < MIN_ELEMENTS) {
            f(t, 0, t.m);
            return;
        }
        const size_t chunk = std::max<size_t>((t.m + 4 * others_ + 3) / (4 * others_ + 4), 1);
        call         c     = { f, &t, chunk, { 0 }, 0 };
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            calls_.push_back(&c);
        }
        wake_.notify_all();
        c.work();
        std::unique_lock<std::mutex> lock(mutex_);
        calls_.erase(std::find(calls_.begin(), calls_.end(), &c));
        left_.wait(lock, [&c] { return c.workers == 0; });
    }

  private:
    static constexpr size_t MIN_ELEMENTS = 1 << 20;

    struct call {
        function            f;
        const task *        t;
        size_t              chunk;
        std::atomic<size_t> next;
        size_t              workers;  // other threads that are in it; under the mutex

        bool more() const { return next.load(std::memory_order_relaxed) < t->m; }

        void work() {
            for (size_t begin; (begin = next.fetch_add(chunk, std::memory_order_relaxed)) < t->m;) {
                f(*t, begin, std::min(begin + chunk, t->m));
            }
        }
    };

    [[noreturn]] void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            call * found = nullptr;
            wake_.wait(lock, [this, &found] {
                const auto at = std::find_if(calls_.begin(), calls_.end(), [](const call * c) { return c->more(); });
                found         = at == calls_.end() ? nullptr : *at;
                return found != nullptr;
            });
            found->workers++;
            lock.unlock();
            found->work();
            lock.lock();
            if (--found->workers == 0) {
                left_.notify_all();
            }
        }
    }

    std::mutex              mutex_;
    std::condition_variable wake_, left_;
    std::vector<call *>     calls_;
    size_t                  others_;
};

// As many as the helper lets XLA have.
static thread_pool & threads() {
    const char *  asked = getenv("PJRT_NPROC");
    static auto * pool =
        new thread_pool(asked != nullptr ? strtoul(asked, nullptr, 10) : 1);  // never ends: its threads use it
    return *pool;
}

// ---- calls ---------------------------------------------------------------------------------------------------------------

template <weight_type Type> static function function_of(bool wide) {
#if HAS_AVX512
    if (wide) {
        return product512<Type>;
    }
#else
    (void) wide;
#endif
    return product_any<Type>;
}

static function function_of(weight_type type, bool wide) {
    switch (type) {
        case weight_type::q4_0:
            return function_of<weight_type::q4_0>(wide);
        case weight_type::q4_1:
            return function_of<weight_type::q4_1>(wide);
        case weight_type::q5_0:
            return function_of<weight_type::q5_0>(wide);
        case weight_type::q5_1:
            return function_of<weight_type::q5_1>(wide);
        case weight_type::q8_0:
            return function_of<weight_type::q8_0>(wide);
        case weight_type::q2_K:
            return function_of<weight_type::q2_K>(wide);
        case weight_type::q3_K:
            return function_of<weight_type::q3_K>(wide);
        case weight_type::q4_K:
            return function_of<weight_type::q4_K>(wide);
        case weight_type::q5_K:
            return function_of<weight_type::q5_K>(wide);
        case weight_type::q6_K:
            return function_of<weight_type::q6_K>(wide);
        case weight_type::iq4_nl:
            return function_of<weight_type::iq4_nl>(wide);
        case weight_type::iq4_xs:
            return function_of<weight_type::iq4_xs>(wide);
        case weight_type::mxfp4:
            return function_of<weight_type::mxfp4>(wide);
    }
    return nullptr;
}

static bool has_avx512() {
#if HAS_AVX512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

}  // namespace simulator

using namespace simulator;

// Products of a weight, the first operand, and rows, the second. `options`: numbers with a space after each: the type, whether the rows are
// bfloat16 (else float32), m, k, n, and whether only what any processor can is used, for tests.
extern "C" void nrt_simulator_weights(void * out, const void ** in, const char * options, size_t size, void *) {
    size_t numbers[6] = {};
    size_t at         = 0;
    for (size_t i = 0; i < size && at < 6; i++) {
        if (options[i] == ' ') {
            at++;
        } else {
            numbers[at] = numbers[at] * 10 + static_cast<size_t>(options[i] - '0');
        }
    }
    static const bool wide = has_avx512();
    const size_t      m = numbers[2], k = numbers[3], n = numbers[4];
    task              t = {
        static_cast<const uint8_t *>(in[0]), static_cast<const float *>(in[1]), static_cast<float *>(out), m, k, n
    };
    std::vector<float> floats;
    if (numbers[1] != 0) {
        const uint16_t * rows = static_cast<const uint16_t *>(in[1]);
        floats.resize(n * k);
        for (size_t i = 0; i < floats.size(); i++) {
            floats[i] = float_of(static_cast<uint32_t>(rows[i]) << 16);
        }
        t.x = floats.data();
    }
    threads().run(function_of(static_cast<weight_type>(numbers[0]), wide && numbers[5] == 0), t);
}
