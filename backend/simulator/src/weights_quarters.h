// Products of one row and weights whose 2-bit code selects one of four values, for any vector width. A part of
// weights_avx2.cpp and weights_avx512.cpp.
//
// One instruction looks up one of four numbers in each quarter or half of a vector, by the lower two bits of each 32.
// So the codes of bytes N, N + 4, ... of 32 bytes only have to be shifted there. A vector then has the elements 4 i + N
// of 32. The row is permuted into this order once. Partial sums are the same as in weights_loops.h, so the bits are the
// same.

#include "weights_loops.h"

// Adds up products of a row of the matrix and one row of x.
struct quarters_multiplied {
    static constexpr int PARTS = 32 / WIDTH;

    floats        part[PARTS];
    const float * x;  // the next 32 elements, in the order of the vectors

    INLINE explicit quarters_multiplied(const float * row) : x(row) {
        for (floats & one : part) {
            one = all(0.0f);
        }
    }

    // Adds 32 elements. Bits `Bit` and `Bit + 1` of byte i of `q` select element i: among the first four of `values` if
    // i is below 16, else among the last four.
    template <int Bit> INLINE void add(__m256 values, __m256i q) {
        const floats table = repeated(values);
        const ints   codes = repeated(q);
        add_part<Bit, 0>(table, codes);
        add_part<Bit, 1>(table, codes);
        if constexpr (PARTS == 4) {
            add_part<Bit, 2>(table, codes);
            add_part<Bit, 3>(table, codes);
        }
        x += 32;
    }

    template <int Bit, int Part> INLINE void add_part(floats values, ints codes) {
        const floats w = chosen_of_4(values, every_fourth<Bit, Part>(codes));
        part[Part]     = multiplied_added(w, loaded(x + WIDTH * Part), part[Part]);
    }

    // Adds the parts in the order of `sums::sum`.
    INLINE float sum() const {
        __m128 one[4];
        for (int i = 0; i < 4; i++) {
            const __m256 eight = i < PARTS ? first_eight(part[i]) : last_eight(part[i % PARTS]);
            const __m128 four  = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
            const __m128 two   = _mm_add_ps(four, _mm_movehl_ps(four, four));
            one[i]             = _mm_add_ss(two, _mm_movehdup_ps(two));
        }
        return _mm_cvtss_f32(_mm_add_ss(_mm_add_ss(one[0], one[2]), _mm_add_ss(one[1], one[3])));
    }
};

// ---- types: layouts as in weights_loops.h ---------------------------------------------------------------------------

// Returns eight signed bytes, each times d.
INLINE __m256 scaled(uint64_t bytes, floats d) {
    const __m256i numbers = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), first_eight(d));
}

// Rounds to the nearest bfloat16, ties to even.
INLINE __m256 rounded_8(__m256 x) {
    const __m256i number = _mm256_castps_si256(x);
    const __m256i odd    = _mm256_and_si256(_mm256_srli_epi32(number, 16), _mm256_set1_epi32(1));
    const __m256i up     = _mm256_add_epi32(_mm256_add_epi32(number, odd), _mm256_set1_epi32(0x7fff));
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-0x10000)));
}

// Returns the values of runs `Run` and `Run + 1` of eight.
template <int Run> INLINE __m256 values_2_k(__m256 scale, __m256 minimum) {
    const __m256i run = _mm256_setr_epi32(Run, Run, Run, Run, Run + 1, Run + 1, Run + 1, Run + 1);
    const __m256  y   = _mm256_mul_ps(_mm256_load_ps(FOURS), _mm256_permutevar8x32_ps(scale, run));
    return rounded_8(_mm256_sub_ps(y, _mm256_permutevar8x32_ps(minimum, run)));
}

INLINE void multiply_2_k(const uint8_t * x, quarters_multiplied & total) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
    const floats       d = half(x + 80), dmin = half(x + 82);
    for (int k = 0; k < 2; k++) {
        const auto    packed = number_at<uint64_t>(x + 8 * k);
        const __m256  scale = scaled(packed & LOW, d), minimum = scaled(packed >> 4 & LOW, dmin);
        const __m256i q = bytes_32(x + 16 + 32 * k);
        total.add<0>(values_2_k<0>(scale, minimum), q);
        total.add<2>(values_2_k<2>(scale, minimum), q);
        total.add<4>(values_2_k<4>(scale, minimum), q);
        total.add<6>(values_2_k<6>(scale, minimum), q);
    }
}

// Returns the values of a type whose elements are -1, 0 or 1 times d.
INLINE __m256 ternary(const uint8_t * d) {
    return rounded_8(_mm256_mul_ps(_mm256_load_ps(LESS_1), first_eight(half(d))));
}

// Multiplies elements whose codes are the bytes of a vector.
struct digits_multiplied {
    quarters_multiplied & total;
    __m256                values;

    INLINE void operator()(int, __m256i codes) { total.add<0>(values, codes); }
};

INLINE void multiply_t1_0(const uint8_t * x, quarters_multiplied & total) {
    digits_multiplied use{ total, ternary(x + 52) };
    digits_t1_0(x, use);
}

INLINE void multiply_t2_0(const uint8_t * x, quarters_multiplied & total) {
    const __m256 values = ternary(x + 64);
    for (int i = 0; i < 2; i++) {
        const __m256i q = bytes_32(x + 32 * i);
        total.add<0>(values, q);
        total.add<2>(values, q);
        total.add<4>(values, q);
        total.add<6>(values, q);
    }
}

template <weight_type Type> INLINE void multiply_quarters(const uint8_t * x, quarters_multiplied & total) {
    if constexpr (Type == weight_type::q2_K) {
        multiply_2_k(x, total);
    } else if constexpr (Type == weight_type::tq1_0) {
        multiply_t1_0(x, total);
    } else {
        static_assert(Type == weight_type::tq2_0, "a function for each type");
        multiply_t2_0(x, total);
    }
}

// ---- products --------------------------------------------------------------------------------------------------------------

// Aligned to a multiple of the vector's size, so that a load does not cross a cache line.
struct alignas(64) thirty_two_numbers {
    float number[32];
};

template <weight_type Type> TARGET static void product_by_quarters(const weight_product & t, size_t begin, size_t end) {
    constexpr weight_block BLOCK  = block_of(Type);
    constexpr int          AT[]   = { 0, WIDTH == 16 ? 2 : 1, WIDTH == 16 ? 1 : 2, 3 };  // places of groups of eight
    const size_t           blocks = t.k / BLOCK.elements, bytes_of_row = blocks * BLOCK.bytes;
    if (t.n != 1) {
        product<Type>(t, begin, end);
        return;
    }
    std::vector<thirty_two_numbers> room(t.k / 32);
    for (size_t i = 0; i < t.k; i++) {
        room[i / 32].number[AT[i % 4] * 8 + i % 32 / 4] = t.x[i];
    }
    const float * const row = room.data()->number;
    size_t              i   = begin;
    // Two rows at a time: with few partial sums, each sum would wait for its own result.
    for (; WIDTH == 16 && i + 2 <= end; i += 2) {
        const uint8_t *     w = t.weights + i * bytes_of_row;
        quarters_multiplied first(row), second(row);
        for (size_t b = 0; b < blocks; b++, w += BLOCK.bytes) {
            multiply_quarters<Type>(w, first);
            multiply_quarters<Type>(w + bytes_of_row, second);
        }
        t.y[i]     = first.sum();
        t.y[i + 1] = second.sum();
    }
    for (; i < end; i++) {
        const uint8_t *     w = t.weights + i * bytes_of_row;
        quarters_multiplied total(row);
        for (size_t b = 0; b < blocks; b++, w += BLOCK.bytes) {
            multiply_quarters<Type>(w, total);
        }
        t.y[i] = total.sum();
    }
}

// Returns the function of a type; null if this file has none. With vectors of 16 numbers, only TQ2_0 becomes faster.
static weight_function function_by_quarters(weight_type type) {
    if (type == weight_type::tq2_0) {
        return product_by_quarters<weight_type::tq2_0>;
    }
    if constexpr (WIDTH == 8) {
        if (type == weight_type::q2_K) {
            return product_by_quarters<weight_type::q2_K>;
        }
        if (type == weight_type::tq1_0) {
            return product_by_quarters<weight_type::tq1_0>;
        }
    }
    return nullptr;
}
