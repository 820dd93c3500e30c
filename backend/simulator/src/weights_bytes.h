// Products of one row and weights whose 4-bit code selects one of 16 values, with AVX2. A part of weights_avx2.cpp.
//
// An element is a bfloat16 of two bytes. One instruction looks up one byte for each of 32 codes, so two instructions
// give 32 elements, and no code has to be widened to 32 bits. The elements then have another order, `PLACES`. The row
// is permuted into this order once. Partial sums are the same as in weights_loops.h, so the bits are the same.

#include "weights_loops.h"

// The order of 32 elements in four vectors: elements 4 i to 4 i + 3 of this order are elements PLACES[i] to
// PLACES[i] + 3.
static constexpr int PLACES[] = { 0, 16, 4, 20, 8, 24, 12, 28 };

// The bytes of 16 elements; each vector holds its bytes twice.
struct byte_table {
    __m256i low, high;
};

// Rounds as `rounded` does, but leaves the lower 16 bits dirty.
INLINE __m256i rounded_above(floats x) {
    const __m256i number = _mm256_castps_si256(x);
    const __m256i odd    = masked(shifted_right<16>(number), 1);
    return _mm256_add_epi32(_mm256_add_epi32(number, all(0x7fff)), odd);
}

// Returns the table of numbers rounded to bfloat16. Its order: four numbers of `a`, four of `b`, and so on.
INLINE byte_table table_of(floats a, floats b) {
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15, 0, 4, 8, 12, 2, 6, 10,
                                           14, 1, 5, 9, 13, 3, 7, 11, 15);
    const __m256i words = _mm256_blend_epi16(shifted_right<16>(rounded_above(a)), rounded_above(b), 0xaa);
    const __m256i eight = _mm256_shuffle_epi8(words, order);  // in each half: lower bytes, then upper ones
    return { _mm256_permute4x64_epi64(eight, 0x88), _mm256_permute4x64_epi64(eight, 0xdd) };
}

// Splits 16 values for `table_of`: `a` gets numbers 0 to 3 and 8 to 11, `b` the others.
INLINE void in_turn(const float * values, floats & a, floats & b) {
    const floats first = loaded(values), second = loaded(values + 8);
    a = _mm256_permute2f128_ps(first, second, 0x20);
    b = _mm256_permute2f128_ps(first, second, 0x31);
}

// Returns the table of values times a scale.
INLINE byte_table table_of(const float * values, floats d) {
    floats a, b;
    in_turn(values, a, b);
    return table_of(multiplied(a, d), multiplied(b, d));
}

// Returns the table of c * d + m for the codes c from 0 to 15.
INLINE byte_table table_from_0(floats d, floats m) {
    floats a, b;
    in_turn(NUMBERS + 16, a, b);
    return table_of(added(multiplied(a, d), m), added(multiplied(b, d), m));
}

// Adds up products of a row of the matrix and one row of x, which is in the order of PLACES.
struct bytes_multiplied {
    floats        part[4];
    const float * x;  // the next 32 elements

    INLINE explicit bytes_multiplied(const float * row) : part{ all(0.0f), all(0.0f), all(0.0f), all(0.0f) }, x(row) {}

    INLINE void add(const byte_table & table, __m256i code) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i low = _mm256_shuffle_epi8(table.low, code), high = _mm256_shuffle_epi8(table.high, code);
        const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
        add(0, _mm256_unpacklo_epi16(zero, first));
        add(1, _mm256_unpackhi_epi16(zero, first));
        add(2, _mm256_unpacklo_epi16(zero, second));
        add(3, _mm256_unpackhi_epi16(zero, second));
        x += 32;
    }

    // Adds products of a table's elements times `d`. These must be bfloat16 numbers without rounding.
    INLINE void add(const byte_table & table, __m256i code, floats d) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i low = _mm256_shuffle_epi8(table.low, code), high = _mm256_shuffle_epi8(table.high, code);
        const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
        add(0, _mm256_unpacklo_epi16(zero, first), d);
        add(1, _mm256_unpackhi_epi16(zero, first), d);
        add(2, _mm256_unpacklo_epi16(zero, second), d);
        add(3, _mm256_unpackhi_epi16(zero, second), d);
        x += 32;
    }

    INLINE void add(int i, __m256i w) {
        part[i] = multiplied_added(_mm256_castsi256_ps(w), loaded(x + 8 * i), part[i]);
    }

    INLINE void add(int i, __m256i w, floats d) {
        part[i] = multiplied_added(multiplied(_mm256_castsi256_ps(w), d), loaded(x + 8 * i), part[i]);
    }

    // Adds the parts in the order of `sums::sum`.
    INLINE float sum() const {
        __m128 four[4];
        for (int i = 0; i < 4; i++) {
            four[i] = _mm_add_ps(_mm256_castps256_ps128(part[i]), _mm256_extractf128_ps(part[i], 1));
        }
        const __m128 last = _mm_add_ps(_mm_add_ps(four[0], four[2]), _mm_add_ps(four[1], four[3]));
        const __m128 two  = _mm_add_ps(last, _mm_movehl_ps(last, last));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};

// Returns the codes in 16 bytes: the 16 lower halves, then the 16 upper halves.
INLINE __m256i halves(const uint8_t * at) {
    const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return both(_mm256_set_m128i(_mm_srli_epi16(q, 4), q), 15);
}

// ---- types: layouts as in weights_loops.h ---------------------------------------------------------------------------

INLINE void multiply_3_k(const uint8_t * x, bytes_multiplied & total) {
    const floats    d = half(x + 108);
    const q3_scales packed(x + 96);
    float           scale[16];
    scaled(less_32(packed.first), d, scale);
    scaled(less_32(packed.last), d, scale + 8);
    // A table has the eight values of two runs of 16 elements: four values of the first run, four of the second, then
    // the others.
    const __m256i runs = two_runs(0, 4);
    const __m256i tops = bytes_32(x);
    for (int i = 0; i < 256; i += 128) {
        __m256i q   = bytes_32(x + 32 + i / 4);
        __m256i top = i == 0 ? _mm256_slli_epi16(tops, 3) : _mm256_srli_epi16(tops, 1);
        for (int run = i / 16; run < i / 16 + 8; run += 2) {
            const byte_table table =
                table_of(multiplied(loaded(EIGHTS), all(scale[run])), multiplied(loaded(EIGHTS), all(scale[run + 1])));
            total.add(table, either(q, 3, either(top, 8, runs)));
            q   = _mm256_srli_epi16(q, 2);
            top = _mm256_srli_epi16(top, 1);
        }
    }
}

INLINE void multiply_4_k(const uint8_t * x, bytes_multiplied & total) {
    const floats   d = half(x), dmin = half(x + 2);
    const k_scales packed(x + 4);
    float          scale[8], minimum[8];
    scaled(packed.scales, d, scale);
    scaled(packed.minima, subtracted(all(-0.0f), dmin), minimum);
    for (int i = 0; i < 8; i += 2) {
        const __m256i q = bytes_32(x + 16 + 16 * i);
        total.add(table_from_0(all(scale[i]), all(minimum[i])), both(q, 15));
        total.add(table_from_0(all(scale[i + 1]), all(minimum[i + 1])), both(_mm256_srli_epi16(q, 4), 15));
    }
}

INLINE void multiply_4_xs(const uint8_t * x, bytes_multiplied & total) {
    float scale[8];
    scaled(less_32(iq4_scales(x + 2)), half(x), scale);
    for (int i = 0; i < 8; i++) {
        total.add(table_of(IQ4_NL, all(scale[i])), halves(x + 8 + 16 * i));
    }
}

// Computes the four scales together, with the formula of `half_ue4m3`.
INLINE void multiply_nvfp4(const uint8_t * x, bytes_multiplied & total) {
    const __m256i    packed = _mm256_cvtepu8_epi32(_mm_cvtsi32_si128(number_at<int32_t>(x)));
    const __m256i    wide   = masked(packed, 127);
    const floats     small  = multiplied(to_floats(wide), all(0x1p-10f));
    const floats     large  = _mm256_castsi256_ps(added(shifted_left<20>(wide), all(119 << 23)));
    const floats     found  = _mm256_blendv_ps(large, small, _mm256_castsi256_ps(_mm256_cmpgt_epi32(all(8), wide)));
    const floats     scales = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(packed, all(127))), found);
    // The product of an E2M1 and an E4M3 number is a bfloat16 without rounding.
    const byte_table table  = table_of(E2M1, all(1.0f));
    const __m256i    q = bytes_32(x + 4), low = both(q, 15), high = both(_mm256_srli_epi16(q, 4), 15);
    const __m256i    even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
    total.add(table, _mm256_permute2x128_si256(even, odd, 0x20),
              chosen(scales, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)));
    total.add(table, _mm256_permute2x128_si256(even, odd, 0x31),
              chosen(scales, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)));
}

template <weight_type Type> INLINE void multiply_bytes(const uint8_t * x, bytes_multiplied & total) {
    if constexpr (Type == weight_type::q4_0) {
        total.add(table_of(NUMBERS + 8, half(x)), halves(x + 2));
    } else if constexpr (Type == weight_type::iq4_nl) {
        total.add(table_of(IQ4_NL, half(x)), halves(x + 2));
    } else if constexpr (Type == weight_type::q4_1) {
        total.add(table_from_0(half(x), half(x + 2)), halves(x + 4));
    } else if constexpr (Type == weight_type::mxfp4) {
        total.add(table_of(E2M1, all(half_e8m0(x[0]))), halves(x + 1));
    } else if constexpr (Type == weight_type::q3_K) {
        multiply_3_k(x, total);
    } else if constexpr (Type == weight_type::q4_K) {
        multiply_4_k(x, total);
    } else if constexpr (Type == weight_type::nvfp4) {
        multiply_nvfp4(x, total);
    } else {
        static_assert(Type == weight_type::iq4_xs, "a function for each type");
        multiply_4_xs(x, total);
    }
}

// ---- products --------------------------------------------------------------------------------------------------------------

// Aligned to its size, so that a load does not cross a cache line.
struct alignas(32) vector_of_8 {
    float number[8];
};

template <weight_type Type> TARGET static void product_by_bytes(const weight_product & t, size_t begin, size_t end) {
    constexpr weight_block BLOCK  = block_of(Type);
    const size_t           blocks = t.k / BLOCK.elements;
    if (t.n != 1) {
        product<Type>(t, begin, end);
        return;
    }
    std::vector<vector_of_8> room(t.k / 8);
    float * const            row = room.data()->number;
    for (size_t i = 0; i < t.k; i += 32) {
        for (size_t k = 0; k < 8; k++) {
            _mm_store_ps(row + i + 4 * k, _mm_loadu_ps(t.x + i + PLACES[k]));
        }
    }
    for (size_t i = begin; i < end; i++) {
        const uint8_t *  w = t.weights + i * blocks * BLOCK.bytes;
        bytes_multiplied total(row);
        for (size_t b = 0; b < blocks; b++, w += BLOCK.bytes) {
            multiply_bytes<Type>(w, total);
        }
        t.y[i] = total.sum();
    }
}

// Returns the function of a type; null if this file has none.
static weight_function function_by_bytes(weight_type type) {
    switch (type) {
        case weight_type::q4_0:
            return product_by_bytes<weight_type::q4_0>;
        case weight_type::q4_1:
            return product_by_bytes<weight_type::q4_1>;
        case weight_type::q3_K:
            return product_by_bytes<weight_type::q3_K>;
        case weight_type::q4_K:
            return product_by_bytes<weight_type::q4_K>;
        case weight_type::iq4_nl:
            return product_by_bytes<weight_type::iq4_nl>;
        case weight_type::iq4_xs:
            return product_by_bytes<weight_type::iq4_xs>;
        case weight_type::mxfp4:
            return product_by_bytes<weight_type::mxfp4>;
        case weight_type::nvfp4:
            return product_by_bytes<weight_type::nvfp4>;
        default:
            return nullptr;
    }
}
