// Products of attention with vectors of 16 numbers.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false warning in GCC's own header
#    endif
#    include <immintrin.h>
#    define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#    define INLINE TARGET inline __attribute__((always_inline))

namespace simulator::attention_avx512 {

enum class half : uint16_t {};
enum class bfloat16 : uint16_t {};

using sixteen = __m512;

INLINE sixteen zeros() {
    return _mm512_setzero_ps();
}

INLINE sixteen all(float x) {
    return _mm512_set1_ps(x);
}

INLINE sixteen loaded(const float * at) {
    return _mm512_loadu_ps(at);
}

INLINE sixteen loaded(const half * at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

INLINE sixteen loaded(const bfloat16 * at) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

INLINE void stored(float * at, sixteen x) {
    _mm512_storeu_ps(at, x);
}

INLINE sixteen multiplied_added(sixteen a, sixteen b, sixteen c) {
    return _mm512_fmadd_ps(a, b, c);
}

// Adds the numbers 8 to 15 to the numbers 0 to 7.
INLINE __m256 halves_added(sixteen x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}

#    include "attention_loops.h"

}  // namespace simulator::attention_avx512

simulator::cache_functions simulator::avx512_attention(cache_type type) {
    return attention_avx512::functions_of(type);
}

#    undef TARGET
#    undef INLINE
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif
#else
simulator::cache_functions simulator::avx512_attention(cache_type) {
    return {};
}
#endif
