// Products of attention with vectors of 8 numbers.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#    include <immintrin.h>
#    define TARGET __attribute__((target("avx2,fma,f16c")))
#    define INLINE TARGET inline __attribute__((always_inline))

namespace simulator::attention_avx2 {

enum class half : uint16_t {};
enum class bfloat16 : uint16_t {};

struct sixteen {
    __m256 low, high;
};

INLINE sixteen zeros() {
    return { _mm256_setzero_ps(), _mm256_setzero_ps() };
}

INLINE sixteen all(float x) {
    return { _mm256_set1_ps(x), _mm256_set1_ps(x) };
}

INLINE sixteen loaded(const float * at) {
    return { _mm256_loadu_ps(at), _mm256_loadu_ps(at + 8) };
}

INLINE __m256 eight(const half * at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

INLINE __m256 eight(const bfloat16 * at) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

INLINE sixteen loaded(const half * at) {
    return { eight(at), eight(at + 8) };
}

INLINE sixteen loaded(const bfloat16 * at) {
    return { eight(at), eight(at + 8) };
}

INLINE void stored(float * at, sixteen x) {
    _mm256_storeu_ps(at, x.low);
    _mm256_storeu_ps(at + 8, x.high);
}

INLINE sixteen multiplied_added(sixteen a, sixteen b, sixteen c) {
    return { _mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high) };
}

// Adds the numbers 8 to 15 to the numbers 0 to 7.
INLINE __m256 halves_added(sixteen x) {
    return _mm256_add_ps(x.low, x.high);
}

#    include "attention_loops.h"

}  // namespace simulator::attention_avx2

simulator::cache_functions simulator::avx2_attention(cache_type type) {
    return attention_avx2::functions_of(type);
}

#    undef TARGET
#    undef INLINE
#else
simulator::cache_functions simulator::avx2_attention(cache_type) {
    return {};
}
#endif
