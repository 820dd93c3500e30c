// Products by quantized weights with vectors of 8 numbers.

#include "weights_blocks.h"

#include <vector>

#if defined(__x86_64__)
#    include <immintrin.h>
#    define TARGET __attribute__((target("avx2,fma,f16c")))
#    define INLINE TARGET inline __attribute__((always_inline))

namespace simulator::avx2 {

using floats = __m256;
using ints   = __m256i;

static constexpr int WIDTH = 8;

INLINE floats all(float x) {
    return _mm256_set1_ps(x);
}

INLINE ints all(int x) {
    return _mm256_set1_epi32(x);
}

INLINE floats from_half(uint16_t x) {
    return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(x)));
}

INLINE __m256 first_eight(floats x) {
    return x;
}

INLINE __m256 last_eight(floats x) {
    return x;
}

INLINE floats loaded(const float * at) {
    return _mm256_loadu_ps(at);
}

INLINE void stored(float * at, floats x) {
    _mm256_storeu_ps(at, x);
}

INLINE ints bytes(const uint8_t * at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
}

INLINE ints signed_bytes(const uint8_t * at) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
}

INLINE floats to_floats(ints x) {
    return _mm256_cvtepi32_ps(x);
}

INLINE floats added(floats a, floats b) {
    return _mm256_add_ps(a, b);
}

INLINE ints added(ints a, ints b) {
    return _mm256_add_epi32(a, b);
}

INLINE floats subtracted(floats a, floats b) {
    return _mm256_sub_ps(a, b);
}

INLINE floats multiplied(floats a, floats b) {
    return _mm256_mul_ps(a, b);
}

INLINE floats multiplied_added(floats a, floats b, floats c) {
    return _mm256_fmadd_ps(a, b, c);
}

template <int N> INLINE ints shifted_right(ints x) {
    return _mm256_srli_epi32(x, N);
}

template <int N> INLINE ints shifted_left(ints x) {
    return _mm256_slli_epi32(x, N);
}

INLINE ints masked(ints x, int mask) {
    return _mm256_and_si256(x, all(mask));
}

// Returns (x & mask) | more.
INLINE ints bits(ints x, int mask, ints more) {
    return _mm256_or_si256(masked(x, mask), more);
}

// Returns `Value` in each lane whose bit is set, and 0 in the others.
template <int Value> INLINE ints flags(uint32_t set) {
    const ints each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const ints one  = _mm256_and_si256(all(static_cast<int>(set)), each);
    return masked(_mm256_cmpeq_epi32(one, each), Value);
}

// Returns eight fields of `Bits` bits from a word, beginning with field `first`. The bits above a field are not
// cleared.
template <int Bits> INLINE ints fields(ints word, int first) {
    const ints each = _mm256_setr_epi32(0, Bits, 2 * Bits, 3 * Bits, 4 * Bits, 5 * Bits, 6 * Bits, 7 * Bits);
    return _mm256_srlv_epi32(word, _mm256_add_epi32(each, all(first * Bits)));
}

// Returns the eight 4-bit fields of a word. The bits above a field are not cleared.
INLINE ints fields_of_4(const uint32_t * at) {
    return _mm256_srlv_epi32(all(static_cast<int>(at[0])), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}

// Rounds to the nearest bfloat16, ties to even.
INLINE floats rounded(floats x) {
    const ints number = _mm256_castps_si256(x);
    const ints up     = _mm256_add_epi32(masked(shifted_right<16>(number), 1), all(0x7fff));
    return _mm256_castsi256_ps(masked(_mm256_add_epi32(number, up), -0x10000));
}

// Looks up a value by the lower three bits of each code.
INLINE floats chosen(floats values, ints code) {
    return _mm256_permutevar8x32_ps(values, code);
}

// Looks up a value by the lower four bits of each code.
INLINE floats chosen_of_two(floats low, floats high, ints code) {
    const floats bit3 = _mm256_castsi256_ps(shifted_left<28>(code));  // moves bit 3 to the sign, which selects
    return _mm256_blendv_ps(chosen(low, code), chosen(high, code), bit3);
}

// Looks up a value by the lower two bits of each code, among the four numbers in its half of the vector.
INLINE floats chosen_of_4(floats values, ints code) {
    return _mm256_permutevar_ps(values, code);
}

// Repeats eight numbers until the vector is full.
INLINE floats repeated(__m256 x) {
    return x;
}

INLINE ints repeated(__m256i x) {
    return x;
}

// Returns the bits from `Bit` on of bytes `Part`, `Part` + 4, ...
template <int Bit, int Part> INLINE ints every_fourth(ints x) {
    return shifted_right<Bit + 8 * Part>(x);
}

// Returns two numbers, each four times.
INLINE floats each_4_times(const float * at) {
    return _mm256_set_m128(_mm_set1_ps(at[1]), _mm_set1_ps(at[0]));
}

// Returns a number eight times.
INLINE floats each_8_times(const float * at) {
    return all(at[0]);
}

#    include "weights_bytes.h"
#    include "weights_quarters.h"

}  // namespace simulator::avx2

simulator::weight_function simulator::avx2_function(weight_type type) {
    for (const weight_function f : { avx2::function_by_bytes(type), avx2::function_by_quarters(type) }) {
        if (f != nullptr) {
            return f;
        }
    }
    return avx2::function_of(type);
}

#    undef TARGET
#    undef INLINE
#else
simulator::weight_function simulator::avx2_function(weight_type) {
    return nullptr;
}
#endif
