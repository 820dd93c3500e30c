// Products by quantized weights with vectors of 16 numbers.

#include "weights_blocks.h"

#include <vector>

#if defined(__x86_64__)
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false warning in GCC's own header
#    endif
#    include <immintrin.h>
#    define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#    define INLINE TARGET inline __attribute__((always_inline))

namespace simulator::avx512 {

using floats = __m512;
using ints   = __m512i;

static constexpr int WIDTH = 16;

INLINE floats all(float x) {
    return _mm512_set1_ps(x);
}

INLINE ints all(int x) {
    return _mm512_set1_epi32(x);
}

INLINE floats from_half(uint16_t x) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(x)));
}

INLINE __m256 first_eight(floats x) {
    return _mm512_castps512_ps256(x);
}

INLINE __m256 last_eight(floats x) {
    return _mm512_extractf32x8_ps(x, 1);
}

INLINE floats loaded(const float * at) {
    return _mm512_loadu_ps(at);
}

INLINE void stored(float * at, floats x) {
    _mm512_storeu_ps(at, x);
}

INLINE ints bytes(const uint8_t * at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

INLINE ints signed_bytes(const uint8_t * at) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

INLINE floats to_floats(ints x) {
    return _mm512_cvtepi32_ps(x);
}

INLINE floats added(floats a, floats b) {
    return _mm512_add_ps(a, b);
}

INLINE ints added(ints a, ints b) {
    return _mm512_add_epi32(a, b);
}

INLINE floats subtracted(floats a, floats b) {
    return _mm512_sub_ps(a, b);
}

INLINE floats multiplied(floats a, floats b) {
    return _mm512_mul_ps(a, b);
}

INLINE floats multiplied_added(floats a, floats b, floats c) {
    return _mm512_fmadd_ps(a, b, c);
}

template <int N> INLINE ints shifted_right(ints x) {
    return _mm512_srli_epi32(x, N);
}

template <int N> INLINE ints shifted_left(ints x) {
    return _mm512_slli_epi32(x, N);
}

INLINE ints masked(ints x, int mask) {
    return _mm512_and_si512(x, all(mask));
}

// Returns (x & mask) | more, in one instruction.
INLINE ints bits(ints x, int mask, ints more) {
    return _mm512_ternarylogic_epi32(x, all(mask), more, 0xea);
}

// Returns `Value` in each lane whose bit is set, and 0 in the others.
template <int Value> INLINE ints flags(uint32_t set) {
    return _mm512_maskz_mov_epi32(static_cast<__mmask16>(set), all(Value));
}

// Returns sixteen fields of `Bits` bits from a word, beginning with field `first`. The bits above a field are not
// cleared.
template <int Bits> INLINE ints fields(ints word, int first) {
    const ints each = _mm512_setr_epi32(0, Bits, 2 * Bits, 3 * Bits, 4 * Bits, 5 * Bits, 6 * Bits, 7 * Bits, 8 * Bits,
                                        9 * Bits, 10 * Bits, 11 * Bits, 12 * Bits, 13 * Bits, 14 * Bits, 15 * Bits);
    return _mm512_srlv_epi32(word, _mm512_add_epi32(each, all(first * Bits)));
}

// Returns the sixteen 4-bit fields of two words. The bits above a field are not cleared.
INLINE ints fields_of_4(const uint32_t * at) {
    const ints shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const ints words  = _mm512_mask_set1_epi32(all(static_cast<int>(at[0])), 0xff00, static_cast<int>(at[1]));
    return _mm512_srlv_epi32(words, shifts);
}

// Rounds to the nearest bfloat16, ties to even.
INLINE floats rounded(floats x) {
    const ints      number = _mm512_castps_si512(x);
    const __mmask16 odd    = _mm512_test_epi32_mask(number, all(0x10000));
    const ints      up     = _mm512_add_epi32(number, all(0x7fff));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_mask_sub_epi32(up, odd, up, all(-1)), all(-0x10000)));
}

// Looks up a value by the lower four bits of each code.
INLINE floats chosen(floats values, ints code) {
    return _mm512_permutexvar_ps(code, values);
}

// Looks up a value by the lower five bits of each code.
INLINE floats chosen_of_two(floats low, floats high, ints code) {
    return _mm512_permutex2var_ps(low, code, high);
}

// Looks up a value by the lower two bits of each code, among the four numbers in its quarter of the vector.
INLINE floats chosen_of_4(floats values, ints code) {
    return _mm512_permutevar_ps(values, code);
}

// Repeats eight numbers until the vector is full.
INLINE floats repeated(__m256 x) {
    return _mm512_broadcast_f32x8(x);
}

INLINE ints repeated(__m256i x) {
    return _mm512_broadcast_i32x8(x);
}

// Returns the bits from `Bit` on of bytes `Part`, `Part` + 4, ... in the lower half, and of bytes `Part` + 2, ... in
// the upper half.
template <int Bit, int Part> INLINE ints every_fourth(ints x) {
    constexpr int FIRST = Bit + 8 * Part, LAST = FIRST + 16;
    return _mm512_srlv_epi32(x, _mm512_setr_epi32(FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, LAST, LAST,
                                                  LAST, LAST, LAST, LAST, LAST, LAST));
}

// Returns four numbers, each four times.
INLINE floats each_4_times(const float * at) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                 _mm512_castps128_ps512(_mm_loadu_ps(at)));
}

// Returns two numbers, each eight times.
INLINE floats each_8_times(const float * at) {
    return _mm512_mask_broadcastss_ps(all(at[0]), 0xff00, _mm_load_ss(at + 1));
}

#    include "weights_quarters.h"

}  // namespace simulator::avx512

simulator::weight_function simulator::avx512_function(weight_type type) {
    const weight_function by_quarters = avx512::function_by_quarters(type);
    return by_quarters != nullptr ? by_quarters : avx512::function_of(type);
}

#    undef TARGET
#    undef INLINE
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif
#else
simulator::weight_function simulator::avx512_function(weight_type) {
    return nullptr;
}
#endif
