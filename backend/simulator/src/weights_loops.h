// Products by quantized weights for any vector width. Each file that includes this header defines, in its own
// namespace, the vectors `floats` and `ints`, the number of their elements, `WIDTH`, and the operations on them. TARGET
// is the attribute of functions that use the instruction set; INLINE is the attribute of functions that are always
// inlined into them.
//
// A product has the same terms as the HLO that it replaces (kernels/dequantize.py): each element is computed in float32
// by the same operations, and rounded to bfloat16 where the HLO rounds. Only the order of sums may differ. The compiler
// must not fuse a multiplication and an addition: the element would change.

#pragma once

alignas(64) static const float NUMBERS[] = { -16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1,
                                             0,   1,   2,   3,   4,   5,   6,   7,  8,  9,  10, 11, 12, 13, 14, 15,
                                             16,  17,  18,  19,  20,  21,  22,  23, 24, 25, 26, 27, 28, 29, 30, 31 };
alignas(64) static const float FOURS[]   = { 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3 };
alignas(64) static const float EIGHTS[]  = { -4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3 };
alignas(64) static const float IQ4_NL[]  = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
alignas(64) static const float E2M1[]    = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
alignas(64) static const float SIGNS[]   = { -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1 };
alignas(64) static const float LESS_1[]  = { -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2 };

// Values by a lattice code. The code's upper bit is the sign, or for IQ1 the direction of the shift.
alignas(64) static const float IQ1[]     = { -0.875, 0.125, 1.125, 0, -1.125, -0.125, 0.875, 0,
                                             -0.875, 0.125, 1.125, 0, -1.125, -0.125, 0.875, 0 };
alignas(64) static const float IQ2[]     = { 8, 25, 43, 0, -8, -25, -43, 0, 8, 25, 43, 0, -8, -25, -43, 0 };
alignas(64) static const float IQ3_XXS[] = { 4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62 };
alignas(64) static const float IQ3_S[]   = { 1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15 };

// ---- scales ------------------------------------------------------------------------------------------------------------

// Returns an IEEE half in each lane. A NaN's lower bits become zero, so that rounding needs no check for NaNs.
INLINE floats half(uint16_t bits) {
    if (__builtin_expect((bits & 0x7c00) == 0x7c00, 0)) {
        return all(float_of((bits & 0x8000U) << 16 | ((bits & 0x3ff) != 0 ? 0x7fc00000 : 0x7f800000)));
    }
    return from_half(bits);
}

INLINE floats half(const uint8_t * at) {
    return half(number_at<uint16_t>(at));
}

// Writes eight signed bytes, each times d.
INLINE void scaled(uint64_t bytes, floats d, float * y) {
    const __m256i numbers = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), first_eight(d)));
}

// Subtracts 32 from each of eight bytes, which are below 128.
INLINE uint64_t less_32(uint64_t bytes) {
    return static_cast<uint64_t>(
        _mm_cvtsi128_si64(_mm_sub_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)), _mm_set1_epi8(32))));
}

// Writes sixteen odd numbers times d: 2 x + 1 for each 4-bit number x. A byte has two of them.
INLINE void scaled_odd(uint64_t nibbles, floats d, float * y) {
    const __m128i low  = _mm_cvtsi64_si128(static_cast<int64_t>(odd_numbers(nibbles)));
    const __m128i high = _mm_cvtsi64_si128(static_cast<int64_t>(odd_numbers(nibbles >> 4 & 0x0f0f0f0f0f0f0f0f)));
    const __m128i both = _mm_unpacklo_epi8(low, high);
    scaled(static_cast<uint64_t>(_mm_cvtsi128_si64(both)), d, y);
    scaled(static_cast<uint64_t>(_mm_extract_epi64(both, 1)), d, y + 8);
}

// ---- codes ---------------------------------------------------------------------------------------------------------------

// The codes of a block of 256 elements, one per byte, written 32 at a time.
struct codes {
    alignas(32) uint8_t code[256];

    INLINE void set(int first, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i *>(code + first), x); }

    // Call this after the last `set`: otherwise the compiler extracts the bytes from the vectors, which is slower than
    // loading them.
    INLINE void finish() { __asm__("" : "+m"(code)); }
};

INLINE __m256i bytes_32(const uint8_t * at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
}

INLINE __m256i both(__m256i x, int mask) {
    return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Returns (x & mask) | more.
INLINE __m256i either(__m256i x, int mask, __m256i more) {
    return _mm256_or_si256(both(x, mask), more);
}

// Returns a byte 16 times, then another one 16 times.
INLINE __m256i two_runs(int first, int second) {
    return _mm256_set_m128i(_mm_set1_epi8(static_cast<char>(second)), _mm_set1_epi8(static_cast<char>(first)));
}

// ---- elements ------------------------------------------------------------------------------------------------------------

INLINE floats numbers(int first) {
    return loaded(NUMBERS + 16 + first);
}

// The values of 16 codes with one scale, computed and rounded once for all elements.
struct sixteen {
    floats part[16 / WIDTH];

    // Looks up a value by the lower four bits of each code.
    INLINE floats operator()(ints code) const {
        return WIDTH == 16 ? chosen(part[0], code) : chosen_of_two(part[0], part[16 / WIDTH - 1], code);
    }
};

INLINE sixteen sixteen_of(const float * values, floats d) {
    sixteen out;
    for (int i = 0; i < 16 / WIDTH; i++) {
        out.part[i] = rounded(multiplied(loaded(values + i * WIDTH), d));
    }
    return out;
}

// Returns the values c * d + m for the codes c from 0 to 15.
INLINE sixteen sixteen_from_0(floats d, floats m) {
    sixteen out;
    for (int i = 0; i < 16 / WIDTH; i++) {
        out.part[i] = rounded(added(multiplied(numbers(i * WIDTH), d), m));
    }
    return out;
}

// Passes the elements of 16 bytes to `use`: the lower halves from element `first` on, the upper halves from `second`
// on.
template <typename Use>
INLINE void nibbles(const uint8_t * at, const sixteen & values, int first, int second, Use & use) {
    for (int i = 0; i < 16; i += WIDTH) {
        const ints q = bytes(at + i);
        use(first + i, values(q));
        use(second + i, values(shifted_right<4>(q)));
    }
}

// The values of 32 codes with one scale and minimum, code * d + m, for a d and m with which this equals the HLO's
// result. Vectors of 16 numbers look up one of 32 values in one instruction; others compute the value.
template <bool HasM> struct thirty_two {
    floats low, high, d, m;
    int    first;

    // `from`: the number for code 0.
    INLINE thirty_two(int from, floats scale, floats minimum) : d(scale), m(minimum), first(from) {
        if constexpr (WIDTH == 16) {
            low  = value(numbers(from));
            high = value(numbers(from + 16));
        }
    }

    INLINE floats value(floats number) const {
        const floats y = multiplied(number, d);
        return rounded(HasM ? added(y, m) : y);
    }

    // Returns the values for codes with bits 0 to 3 in `nibble` and bit 4 in `bit4`, whose other bits are 0.
    INLINE floats operator()(ints nibble, ints bit4) const {
        const ints code = bits(nibble, 15, bit4);
        if constexpr (WIDTH == 16) {
            return chosen_of_two(low, high, code);
        } else {
            return value(to_floats(added(code, all(first))));
        }
    }
};

// ---- lattices ------------------------------------------------------------------------------------------------------------

// A word for each eight elements of a block of 256 elements. Each element has 4 bits: the code of its point, and above
// it a flag. Flags are set first, 32 bytes at a time. Then each word gets its codes, with loads of single numbers.
struct words {
    alignas(32) uint32_t word[32];

    // Returns the flags that select the second of two runs of `Run` elements, where one vector holds the values of two
    // runs.
    template <int Run> static INLINE __m256i second_run() {
        const int second = WIDTH == 16 ? static_cast<int>(0x88888888) : 0;
        return Run == 16 ? _mm256_setr_epi32(0, 0, second, second, 0, 0, second, second)
                         : _mm256_setr_epi32(0, 0, 0, 0, second, second, second, second);
    }

    // Sets the flags of the elements of eight words, from word `first` on.
    INLINE void set(int first, __m256i flags) { _mm256_store_si256(reinterpret_cast<__m256i *>(word + first), flags); }

    // Moves bit i of each of 32 bytes to bit 4 i + `Flag` of a word, and sets the bits of `also`.
    template <int Flag> INLINE void set_bits(__m256i bytes, __m256i also) {
        // Four bits become two bytes with two bits each.
        alignas(16) static constexpr uint8_t LOWER[] = { 0, 1, 16, 17, 0, 1, 16, 17, 0, 1, 16, 17, 0, 1, 16, 17 };
        alignas(16) static constexpr uint8_t UPPER[] = { 0, 0, 0, 0, 1, 1, 1, 1, 16, 16, 16, 16, 17, 17, 17, 17 };
        const __m256i                        lower   = _mm256_slli_epi16(twice_16(LOWER), Flag),
                                             upper   = _mm256_slli_epi16(twice_16(UPPER), Flag);
        // Interleaving works on each half of a vector, so groups of four adjacent bytes go to alternating halves first.
        const __m256i apart = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        const __m256i low = both(apart, 15), high = both(_mm256_srli_epi16(apart, 4), 15);
        const __m256i a = _mm256_shuffle_epi8(lower, low), b = _mm256_shuffle_epi8(upper, low);
        const __m256i c = _mm256_shuffle_epi8(lower, high), d = _mm256_shuffle_epi8(upper, high);
        const __m256i ab[2] = { _mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b) };
        const __m256i cd[2] = { _mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d) };
        for (int i = 0; i < 2; i++) {
            set(16 * i, _mm256_or_si256(_mm256_unpacklo_epi16(ab[i], cd[i]), also));
            set(16 * i + 8, _mm256_or_si256(_mm256_unpackhi_epi16(ab[i], cd[i]), also));
        }
    }

    // Sets the flags of all elements of a word to the sign of a byte.
    INLINE void set_signs(__m256i bytes, __m256i also) {
        const __m128i half[2] = { _mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1) };
        for (int i = 0; i < 2; i++) {
            set_eight_signs(16 * i, half[i], also);
            set_eight_signs(16 * i + 8, _mm_unpackhi_epi64(half[i], half[i]), also);
        }
    }

    // Adds the codes of 32 points of eight elements each.
    template <typename Number> INLINE void add_eights(const Number * number, const uint32_t * lattice) {
        for (int i = 0; i < 32; i += 8) {
            for (int j = i; j < i + 8; j++) {
                put(j, word[j] | lattice[number[j]]);
            }
        }
    }

    // Adds the codes of 64 points of four elements each.
    template <typename Number> INLINE void add_fours(const Number * number, const uint32_t * lattice) {
        for (int i = 0; i < 32; i += 8) {
            for (int j = i; j < i + 8; j++) {
                put(j, word[j] | lattice[number[2 * j]] | lattice[number[2 * j + 1]] << 16);
            }
        }
    }

  private:
    INLINE void set_eight_signs(int first, __m128i bytes, __m256i also) {
        const __m256i negative = _mm256_srai_epi32(_mm256_cvtepi8_epi32(bytes), 31);
        set(first, _mm256_or_si256(_mm256_and_si256(negative, _mm256_set1_epi32(0x44444444)), also));
    }

    // Otherwise the compiler collects several words in a vector, which is slower.
    INLINE void put(int i, uint32_t x) {
        __asm__("" : "+r"(x));
        word[i] = x;
    }

    static INLINE __m256i twice_16(const uint8_t * at) {
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(at)));
    }
};

// The numbers of a block's lattice points; `set` joins 32 lower and 32 upper bytes.
struct numbers_of_points {
    alignas(32) uint16_t number[64];

    INLINE void set(int first, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i *>(number + first), x); }

    INLINE void set(int first, __m256i low, __m256i high) {
        const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
        set(first, _mm256_permute2x128_si256(even, odd, 0x20));
        set(first + 16, _mm256_permute2x128_si256(even, odd, 0x31));
    }

    // Call this after the last `set`, as in `codes`.
    INLINE void finish() { __asm__("" : "+m"(number)); }
};

INLINE __m256i masked_8(__m256i x, int mask) {
    return _mm256_and_si256(x, _mm256_set1_epi32(mask));
}

// Returns every second number of two vectors of 32-bit numbers: the even or the odd ones, by `Choice`.
template <int Choice> INLINE __m256i of_each_two(__m256i first, __m256i last) {
    const __m256 joined = _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(last), Choice);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(joined), 0xd8);
}

// Returns the 2-bit numbers of eight bytes, one per byte.
INLINE __m256i bytes_of_2(uint64_t packed) {
    const __m256i x     = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(packed)));
    const __m256i first = _mm256_or_si256(x, _mm256_slli_epi32(x, 6));
    return both(_mm256_or_si256(first, _mm256_slli_epi32(first, 12)), 3);
}

// Returns 32 bits, one per byte.
INLINE __m256i bytes_of_1(uint32_t packed) {
    const __m256i at   = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i each = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i x    = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(packed)), at);
    return both(_mm256_cmpeq_epi8(_mm256_and_si256(x, each), each), 1);
}

// Returns bytes of seven bits with an eighth bit that makes the number of set bits even (`ksigns_iq2xs`).
INLINE __m256i even_bits(__m256i x) {
    const __m256i odd   = _mm256_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0, 0,
                                           -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m256i lower = _mm256_shuffle_epi8(odd, both(x, 15));
    const __m256i upper = _mm256_shuffle_epi8(odd, both(_mm256_srli_epi16(x, 4), 15));
    return _mm256_or_si256(x, _mm256_xor_si256(lower, upper));
}

// The signs of four points in each of eight words, from 7 bits per point, and the scales (2 x + 1) * d, where x is the
// upper 4 bits.
struct signs_and_scales {
    __m256i signs;
    float   scale[8];

    INLINE signs_and_scales(__m256i x, floats d) {
        const __m256i first = _mm256_or_si256(masked_8(x, 127), masked_8(_mm256_slli_epi32(x, 1), 127 << 8));
        const __m256i last =
            _mm256_or_si256(masked_8(_mm256_slli_epi32(x, 2), 127 << 16), masked_8(_mm256_slli_epi32(x, 3), 127 << 24));
        signs             = even_bits(_mm256_or_si256(first, last));
        const __m256i odd = _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(x, 28), 1), _mm256_set1_epi32(1));
        _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_cvtepi32_ps(odd), first_eight(d)));
    }
};

// Passes the elements of words with eight values to `use`, times the scale of each `Run` elements.
template <int Run, typename Use>
INLINE void eights(const words & all_words, const float * values, float (&scale)[256 / Run], Use & use) {
    constexpr int RUNS = WIDTH / 8;
    __asm__("" : "+m"(scale));  // as in `codes`
    for (int i = 0; i < 256; i += RUNS * Run) {
        const floats y = rounded(multiplied(loaded(values), each_8_times(scale + i / Run)));
        for (int at = i; at < i + RUNS * Run; at += WIDTH) {
            use(at, chosen(y, fields_of_4(all_words.word + at / 8)));
        }
    }
}

// Does the same for sixteen values, and a scale for each 32 elements.
template <typename Use>
INLINE void sixteens(const words & all_words, const float * values, const float * scale, Use & use) {
    for (int i = 0; i < 256; i += 32) {
        const sixteen y = sixteen_of(values, all(scale[i / 32]));
        for (int at = i; at < i + 32; at += WIDTH) {
            use(at, y(fields_of_4(all_words.word + at / 8)));
        }
    }
}

// ---- types: each function passes the elements of a block to `use`, with the index of a vector's first element
// ---------------

// Q4_0: f16 d; 16 bytes: the lower halves are elements 0 to 15, the upper halves elements 16 to 31. IQ4_NL: the same.
template <typename Use> INLINE void unpack_4_0(const uint8_t * x, const float * values, Use & use) {
    nibbles(x + 2, sixteen_of(values, half(x)), 0, 16, use);
}

// Q4_1: f16 d; f16 m; 16 bytes as in Q4_0.
template <typename Use> INLINE void unpack_4_1(const uint8_t * x, Use & use) {
    nibbles(x + 4, sixteen_from_0(half(x), half(x + 2)), 0, 16, use);
}

// MXFP4: E8M0 scale; 16 bytes as in Q4_0.
template <typename Use> INLINE void unpack_mxfp4(const uint8_t * x, Use & use) {
    nibbles(x + 1, sixteen_of(E2M1, all(half_e8m0(x[0]))), 0, 16, use);
}

// Q5_0: f16 d; 32 bits: the top bits; 16 bytes as in Q4_0. Q5_1: the same with f16 m after d.
template <bool One, typename Use> INLINE void unpack_5(const uint8_t * x, Use & use) {
    const thirty_two<One> values(One ? 0 : -16, half(x), One ? half(x + 2) : all(0.0f));
    const auto            top = number_at<uint32_t>(x + (One ? 4 : 2));
    for (int i = 0; i < 16; i += WIDTH) {
        const ints q = bytes(x + (One ? 8 : 6) + i);
        use(i, values(q, flags<16>(top >> i)));
        use(16 + i, values(shifted_right<4>(q), flags<16>(top >> (16 + i))));
    }
}

// Q8_0: f16 d; 32 signed bytes.
template <typename Use> INLINE void unpack_8(const uint8_t * x, Use & use) {
    const floats d = half(x);
    for (int i = 0; i < 32; i += WIDTH) {
        use(i, rounded(multiplied(to_floats(signed_bytes(x + 2 + i)), d)));
    }
}

// Q4_K: f16 d; f16 dmin; 12 bytes: 8 scales and minima; 128 bytes: in each 32, the lower halves are 32 elements and the
// upper halves the next 32. Q5_K: the same with 32 bytes before the 128: bit i of byte j is the top bit of
// element 32 i + j.
template <bool Five, typename Use> INLINE void unpack_4_k(const uint8_t * x, Use & use) {
    const floats   d = half(x), dmin = half(x + 2);
    const k_scales packed(x + 4);
    float          scale[8], minimum[8];
    scaled(packed.scales, d, scale);
    scaled(packed.minima, subtracted(all(-0.0f), dmin), minimum);  // adds the negative minimum instead of a subtraction
    ints top[32 / WIDTH];
    for (int j = 0; Five && j < 32; j += WIDTH) {
        top[j / WIDTH] = shifted_left<4>(bytes(x + 16 + j));
    }
    const uint8_t * low = x + (Five ? 48 : 16);
    for (int i = 0; i < 8; i += 2, low += 32) {
        if constexpr (Five) {
            const thirty_two<true> first(0, all(scale[i]), all(minimum[i]));
            const thirty_two<true> second(0, all(scale[i + 1]), all(minimum[i + 1]));
            for (int j = 0; j < 32; j += WIDTH) {
                const ints q = bytes(low + j);
                ints &     t = top[j / WIDTH];
                use(32 * i + j, first(q, masked(t, 16)));
                use(32 * i + 32 + j, second(shifted_right<4>(q), masked(shifted_right<1>(t), 16)));
                t = shifted_right<2>(t);
            }
        } else {
            const sixteen first  = sixteen_from_0(all(scale[i]), all(minimum[i]));
            const sixteen second = sixteen_from_0(all(scale[i + 1]), all(minimum[i + 1]));
            for (int j = 0; j < 32; j += WIDTH) {
                const ints q = bytes(low + j);
                use(32 * i + j, first(q));
                use(32 * i + 32 + j, second(shifted_right<4>(q)));
            }
        }
    }
}

// Q2_K: 16 bytes: the scales (lower halves) and minima (upper halves) of 16 elements each; 64 bytes: in each 32,
// bits 2 k and 2 k + 1 are elements 32 k to 32 k + 31 of 128; f16 d; f16 dmin.
template <typename Use> INLINE void unpack_2_k(const uint8_t * x, Use & use) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
    constexpr int      RUN = WIDTH / 4;  // runs of 16 elements whose four values share a vector
    const floats       d = half(x + 80), dmin = half(x + 82);
    float              scale[16], minimum[16];
    for (int i = 0; i < 16; i += 8) {
        const auto packed = number_at<uint64_t>(x + i);
        scaled(packed & LOW, d, scale + i);
        scaled(packed >> 4 & LOW, dmin, minimum + i);
    }
    floats values[16 / RUN];
    for (int i = 0; i < 16; i += RUN) {
        const floats y  = multiplied(loaded(FOURS), each_4_times(scale + i));
        values[i / RUN] = rounded(subtracted(y, each_4_times(minimum + i)));
    }
    codes all_codes;
    for (int i = 0; i < 256; i += 128) {
        __m256i q = bytes_32(x + 16 + i / 4);
        for (int k = 0; k < 4; k++) {
            const int run = 2 * k % RUN;
            all_codes.set(i + 32 * k, either(q, 3, two_runs(run * 4, (run + 1) * 4)));
            q = _mm256_srli_epi16(q, 2);
        }
    }
    all_codes.finish();
    for (int i = 0; i < 256; i += 32) {
        for (int at = i; at < i + 32; at += WIDTH) {
            use(at, chosen(values[at / 16 / RUN], bytes(all_codes.code + at)));
        }
    }
}

// Q3_K: 32 bytes: bit i of byte j is the top bit of element 32 i + j; 64 bytes as in Q2_K; 12 bytes: 16 scales; f16 d.
template <typename Use> INLINE void unpack_3_k(const uint8_t * x, Use & use) {
    constexpr int   RUN = WIDTH / 8;  // runs of 16 elements whose eight values share a vector
    const floats    d   = half(x + 108);
    const q3_scales packed(x + 96);
    float           scale[16];
    scaled(less_32(packed.first), d, scale);
    scaled(less_32(packed.last), d, scale + 8);
    floats values[16 / RUN];
    for (int i = 0; i < 16; i += RUN) {
        values[i / RUN] = rounded(multiplied(loaded(EIGHTS), each_8_times(scale + i)));
    }
    codes         all_codes;
    const __m256i tops = bytes_32(x);
    for (int i = 0; i < 256; i += 128) {
        __m256i q   = bytes_32(x + 32 + i / 4);
        __m256i top = i == 0 ? _mm256_slli_epi16(tops, 2) : _mm256_srli_epi16(tops, 2);
        for (int k = 0; k < 4; k++) {
            all_codes.set(i + 32 * k, either(q, 3, either(top, 4, two_runs(0, (RUN - 1) * 8))));
            q   = _mm256_srli_epi16(q, 2);
            top = _mm256_srli_epi16(top, 1);
        }
    }
    all_codes.finish();
    for (int i = 0; i < 256; i += 32) {
        for (int at = i; at < i + 32; at += WIDTH) {
            use(at, chosen(values[at / 16 / RUN], bytes(all_codes.code + at)));
        }
    }
}

// Q6_K: 128 bytes: in each 64, the lower halves are 64 elements and the upper halves the next 64; 64 bytes: two upper
// bits of the elements, in each 32 as in Q2_K; 16 signed bytes: scales; f16 d.
template <typename Use> INLINE void unpack_6_k(const uint8_t * x, Use & use) {
    const floats d = half(x + 208);
    float        scale[16];
    scaled(number_at<uint64_t>(x + 192), d, scale);
    scaled(number_at<uint64_t>(x + 200), d, scale + 8);
    codes         all_codes;
    const __m256i middle = _mm256_set1_epi8(32);
    for (int i = 0; i < 256; i += 128) {
        const __m256i top       = bytes_32(x + 128 + i / 4);
        const __m256i low[2]    = { bytes_32(x + i / 2), bytes_32(x + i / 2 + 32) };
        const __m256i number[4] = { either(low[0], 15, both(_mm256_slli_epi16(top, 4), 48)),
                                    either(low[1], 15, both(_mm256_slli_epi16(top, 2), 48)),
                                    either(_mm256_srli_epi16(low[0], 4), 15, both(top, 48)),
                                    either(_mm256_srli_epi16(low[1], 4), 15, both(_mm256_srli_epi16(top, 2), 48)) };
        for (int k = 0; k < 4; k++) {
            all_codes.set(i + 32 * k, _mm256_sub_epi8(number[k], middle));
        }
    }
    all_codes.finish();
    for (int i = 0; i < 256; i += 32) {
        for (int at = i; at < i + 32; at += WIDTH) {
            use(at, rounded(multiplied(to_floats(signed_bytes(all_codes.code + at)), all(scale[at / 16]))));
        }
    }
}

// IQ4_XS: f16 d; 6 bytes: 8 scales; 128 bytes: in each 16, elements as in IQ4_NL.
template <typename Use> INLINE void unpack_4_xs(const uint8_t * x, Use & use) {
    float scale[8];
    scaled(less_32(iq4_scales(x + 2)), half(x), scale);
    for (int i = 0; i < 8; i++) {
        nibbles(x + 8 + 16 * i, sixteen_of(IQ4_NL, all(scale[i])), 32 * i, 32 * i + 16, use);
    }
}

// The HLO of the types IQ2 and IQ3 computes a scale as (d * (s + 1/2)) / 4 or / 2. This equals (2 s + 1) * (d / 8) or
// (d / 4).

// IQ2_XXS: f16 d; for each 32 elements: 4 bytes: the points' numbers; 32 bits: 7 sign bits for each point, then the
// scale.
template <typename Use> INLINE void unpack_2_xxs(const uint8_t * x, const uint32_t * lattice, Use & use) {
    const __m256i       first = bytes_32(x + 2), last = bytes_32(x + 34);
    alignas(32) uint8_t number[32];
    _mm256_store_si256(reinterpret_cast<__m256i *>(number), of_each_two<0x88>(first, last));
    signs_and_scales more(of_each_two<0xdd>(first, last), multiplied(half(x), all(0.125f)));
    words            all_words;
    all_words.set_bits<2>(more.signs, words::second_run<32>());
    all_words.add_eights(number, lattice);
    eights<32>(all_words, IQ2, more.scale, use);
}

// IQ2_XS: f16 d; 32 words of 16 bits: a point's number in 9 bits, its signs in 7; 8 bytes: 16 scales.
template <typename Use> INLINE void unpack_2_xs(const uint8_t * x, const uint32_t * lattice, Use & use) {
    const __m256i     first = bytes_32(x + 2), last = bytes_32(x + 34), low_9 = _mm256_set1_epi16(511);
    numbers_of_points points;
    points.set(0, _mm256_and_si256(first, low_9));
    points.set(16, _mm256_and_si256(last, low_9));
    points.finish();
    const __m256i signs = _mm256_packus_epi16(_mm256_srli_epi16(first, 9), _mm256_srli_epi16(last, 9));
    words         all_words;
    all_words.set_bits<2>(even_bits(_mm256_permute4x64_epi64(signs, 0xd8)), words::second_run<16>());
    all_words.add_eights(points.number, lattice);
    float scale[16];
    scaled_odd(number_at<uint64_t>(x + 66), multiplied(half(x), all(0.125f)), scale);
    eights<16>(all_words, IQ2, scale, use);
}

// IQ2_S: f16 d; 32 bytes: the points' numbers; 32 bytes: signs; 8 bytes: two upper bits of each number; 8 bytes: 16
// scales.
template <typename Use> INLINE void unpack_2_s(const uint8_t * x, const uint32_t * lattice, Use & use) {
    numbers_of_points points;
    points.set(0, bytes_32(x + 2), bytes_of_2(number_at<uint64_t>(x + 66)));
    points.finish();
    words all_words;
    all_words.set_bits<2>(bytes_32(x + 34), words::second_run<16>());
    all_words.add_eights(points.number, lattice);
    float scale[16];
    scaled_odd(number_at<uint64_t>(x + 74), multiplied(half(x), all(0.125f)), scale);
    eights<16>(all_words, IQ2, scale, use);
}

// IQ3_XXS: f16 d; 64 bytes: the points' numbers; for each 32 elements 32 bits as in IQ2_XXS.
template <typename Use> INLINE void unpack_3_xxs(const uint8_t * x, const uint32_t * lattice, Use & use) {
    const signs_and_scales more(bytes_32(x + 66), multiplied(half(x), all(0.25f)));
    words                  all_words;
    all_words.set_bits<3>(more.signs, _mm256_setzero_si256());
    all_words.add_fours(x + 2, lattice);
    sixteens(all_words, IQ3_XXS, more.scale, use);
}

// IQ3_S: f16 d; 64 bytes: the points' numbers; 8 bytes: one upper bit of each; 32 bytes: signs; 4 bytes: 8 scales.
template <typename Use> INLINE void unpack_3_s(const uint8_t * x, const uint32_t * lattice, Use & use) {
    numbers_of_points points;
    for (int i = 0; i < 64; i += 32) {
        points.set(i, bytes_32(x + 2 + i), bytes_of_1(number_at<uint32_t>(x + 66 + i / 8)));
    }
    points.finish();
    words all_words;
    all_words.set_bits<3>(bytes_32(x + 74), _mm256_setzero_si256());
    all_words.add_fours(points.number, lattice);
    float scale[16];  // 8 are used
    scaled_odd(number_at<uint32_t>(x + 106), half(x), scale);
    sixteens(all_words, IQ3_S, scale, use);
}

// IQ1_S: f16 d; 32 bytes: the points' numbers; for each 32 elements 16 bits: 3 upper bits of each number, 3 bits of
// scale, and the direction of the shift.
template <typename Use> INLINE void unpack_1_s(const uint8_t * x, const uint32_t * lattice, Use & use) {
    const __m128i more  = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 34));
    const __m256i two   = _mm256_broadcastsi128_si256(more);
    // The 16 bits, four times: three of them become bits 8 to 10 of each number.
    const __m256i pairs = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 6, 7,
                                           6, 7, 6, 7, 6, 7);
    const __m256i upper = _mm256_setr_epi8(1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7, 9, 9, 9, 9, 11, 11, 11, 11,
                                           13, 13, 13, 13, 15, 15, 15, 15);
    numbers_of_points points;
    for (int i = 0; i < 2; i++) {
        const __m256i packed = _mm256_shuffle_epi8(two, _mm256_add_epi8(pairs, _mm256_set1_epi8(8 * i)));
        const __m256i moved  = _mm256_mullo_epi16(packed, _mm256_set1_epi64x(0x0001000800400200));
        const __m256i high   = _mm256_and_si256(_mm256_srli_epi16(moved, 1), _mm256_set1_epi16(0x700));
        const __m256i low    = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 2 + 16 * i)));
        points.set(16 * i, _mm256_or_si256(low, high));
    }
    points.finish();
    words all_words;
    all_words.set_signs(_mm256_shuffle_epi8(two, upper), words::second_run<32>());
    all_words.add_eights(points.number, lattice);
    const __m128i scales = _mm_and_si128(_mm_srli_epi16(more, 12), _mm_set1_epi16(7));
    float         scale[8];
    scaled(odd_numbers(static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(scales, scales)))), half(x), scale);
    eights<32>(all_words, IQ1, scale, use);
}

// IQ1_M: 32 bytes: the points' numbers; 16 bytes: 3 upper bits and the direction of the shift for each point; four
// words of 16 bits: four scales each, and a quarter of f16 d.
template <typename Use> INLINE void unpack_1_m(const uint8_t * x, const uint32_t * lattice, Use & use) {
    const __m128i     packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 32));
    const __m128i     upper  = _mm_srli_epi16(packed, 4);
    const __m256i     more   = _mm256_set_m128i(_mm_unpackhi_epi8(packed, upper), _mm_unpacklo_epi8(packed, upper));
    numbers_of_points points;
    points.set(0, bytes_32(x), both(more, 7));
    points.finish();
    const __m256i directions = _mm256_slli_epi16(more, 4);  // as the signs of bytes
    words         all_words;
    all_words.set_signs(directions, words::second_run<16>());
    all_words.add_eights(points.number, lattice);
    uint64_t scales[2] = {};
    uint32_t d         = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t quarter = number_at<uint16_t>(x + 48 + 2 * i);
        const uint32_t four    = (quarter & 7) | (quarter & 56) << 5 | (quarter & 448) << 10 | (quarter & 3584) << 15;
        scales[i / 2] |= static_cast<uint64_t>(four) << 32 * (i % 2);
        d |= quarter >> 12 << 4 * i;
    }
    const floats factor = half(static_cast<uint16_t>(d));
    float        scale[16];
    scaled(odd_numbers(scales[0]), factor, scale);
    scaled(odd_numbers(scales[1]), factor, scale + 8);
    eights<16>(all_words, IQ1, scale, use);
}

// Returns three times each byte, modulo 256.
INLINE __m256i tripled(__m256i x) {
    return _mm256_add_epi8(_mm256_add_epi8(x, x), x);
}

// Returns the first base-3 digit of each byte x, which stands for the fraction x / 256: the integer part of 3 x / 256.
INLINE __m256i first_digit(__m256i x) {
    const __m256i from_1 = _mm256_cmpeq_epi8(_mm256_max_epu8(x, _mm256_set1_epi8(86)), x);
    const __m256i from_2 = _mm256_cmpeq_epi8(_mm256_max_epu8(x, _mm256_set1_epi8(static_cast<char>(171))), x);
    return _mm256_abs_epi8(_mm256_add_epi8(from_1, from_2));
}

// TQ1_0: 48 bytes of five base-3 digits; 4 bytes of four digits; f16 d. The first digits of the first 32 bytes are 32
// elements, their second digits the next 32, and so on; then the same for the next 16 bytes, and for the 4 bytes.
// Passes the digits of 32 elements at a time to `use`, with the index of the first.
template <typename Use> INLINE void digits_t1_0(const uint8_t * x, Use & use) {
    __m256i q = bytes_32(x);
    for (int i = 0; i < 160; i += 32) {
        use(i, first_digit(q));
        q = tripled(q);
    }
    const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 32));
    q                 = _mm256_set_m128i(_mm256_castsi256_si128(tripled(_mm256_castsi128_si256(two))), two);
    for (int i = 160; i < 224; i += 32) {
        use(i, first_digit(q));
        q = tripled(tripled(q));
    }
    const __m256i one   = _mm256_set1_epi32(number_at<int32_t>(x + 48));
    const __m256i three = tripled(one), nine = tripled(three), more = tripled(nine);
    const __m256i last = _mm256_unpacklo_epi64(_mm256_unpacklo_epi32(one, three), _mm256_unpacklo_epi32(nine, more));
    use(224, first_digit(_mm256_permute2x128_si256(q, last, 0x20)));
}

// Stores codes.
struct kept {
    codes all;

    INLINE void operator()(int first, __m256i x) { all.set(first, x); }
};

template <typename Use> INLINE void unpack_t1_0(const uint8_t * x, Use & use) {
    kept digits;
    digits_t1_0(x, digits);
    digits.all.finish();
    const floats values = rounded(multiplied(loaded(LESS_1), half(x + 52)));
    for (int i = 0; i < 256; i += WIDTH) {
        use(i, chosen_of_4(values, bytes(digits.all.code + i)));
    }
}

// TQ2_0: 64 bytes as in Q2_K; f16 d.
template <typename Use> INLINE void unpack_t2_0(const uint8_t * x, Use & use) {
    codes all_codes;
    for (int i = 0; i < 256; i += 128) {
        __m256i q = bytes_32(x + i / 4);
        for (int k = 0; k < 4; k++) {
            all_codes.set(i + 32 * k, both(q, 3));
            q = _mm256_srli_epi16(q, 2);
        }
    }
    all_codes.finish();
    const floats values = rounded(multiplied(loaded(LESS_1), half(x + 64)));
    for (int i = 0; i < 256; i += WIDTH) {
        use(i, chosen_of_4(values, bytes(all_codes.code + i)));
    }
}

// NVFP4: 4 unsigned E4M3 scales; 32 bytes: in each 8, the lower halves are 8 elements and the upper halves the next 8.
template <typename Use> INLINE void unpack_nvfp4(const uint8_t * x, Use & use) {
    codes         all_codes;  // 64 are used
    const __m256i q = bytes_32(x + 4), low = both(q, 15), high = both(_mm256_srli_epi16(q, 4), 15);
    const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
    all_codes.set(0, _mm256_permute2x128_si256(even, odd, 0x20));
    all_codes.set(32, _mm256_permute2x128_si256(even, odd, 0x31));
    all_codes.finish();
    for (int i = 0; i < 64; i += 16) {
        const sixteen values = sixteen_of(E2M1, all(half_ue4m3(x[i / 16])));
        for (int at = i; at < i + 16; at += WIDTH) {
            use(at, values(bytes(all_codes.code + at)));
        }
    }
}

// Q1_0: f16 d; 16 bytes: one bit per element.
template <typename Use> INLINE void unpack_1_0(const uint8_t * x, Use & use) {
    const floats values = rounded(multiplied(loaded(SIGNS), half(x)));
    for (int i = 0; i < 128; i += 32) {
        const ints word = all(number_at<int32_t>(x + 2 + i / 8));
        for (int at = 0; at < 32; at += WIDTH) {
            use(i + at, chosen_of_4(values, fields<1>(word, at)));
        }
    }
}

// Q2_0: f16 d; 16 bytes: two bits per element.
template <typename Use> INLINE void unpack_2_0(const uint8_t * x, Use & use) {
    const floats values = rounded(multiplied(loaded(LESS_1), half(x)));
    for (int i = 0; i < 64; i += 16) {
        const ints word = all(number_at<int32_t>(x + 2 + i / 4));
        for (int at = 0; at < 16; at += WIDTH) {
            use(i + at, chosen_of_4(values, fields<2>(word, at)));
        }
    }
}

template <weight_type Type, typename Use> INLINE void unpack(const uint8_t * x, const uint32_t * lattice, Use & use) {
    if constexpr (Type == weight_type::q4_0) {
        unpack_4_0(x, NUMBERS + 8, use);
    } else if constexpr (Type == weight_type::iq4_nl) {
        unpack_4_0(x, IQ4_NL, use);
    } else if constexpr (Type == weight_type::q4_1) {
        unpack_4_1(x, use);
    } else if constexpr (Type == weight_type::mxfp4) {
        unpack_mxfp4(x, use);
    } else if constexpr (Type == weight_type::q5_0 || Type == weight_type::q5_1) {
        unpack_5<Type == weight_type::q5_1>(x, use);
    } else if constexpr (Type == weight_type::q8_0) {
        unpack_8(x, use);
    } else if constexpr (Type == weight_type::q2_K) {
        unpack_2_k(x, use);
    } else if constexpr (Type == weight_type::q3_K) {
        unpack_3_k(x, use);
    } else if constexpr (Type == weight_type::q4_K || Type == weight_type::q5_K) {
        unpack_4_k<Type == weight_type::q5_K>(x, use);
    } else if constexpr (Type == weight_type::q6_K) {
        unpack_6_k(x, use);
    } else if constexpr (Type == weight_type::iq1_s) {
        unpack_1_s(x, lattice, use);
    } else if constexpr (Type == weight_type::iq1_m) {
        unpack_1_m(x, lattice, use);
    } else if constexpr (Type == weight_type::iq2_xxs) {
        unpack_2_xxs(x, lattice, use);
    } else if constexpr (Type == weight_type::iq2_xs) {
        unpack_2_xs(x, lattice, use);
    } else if constexpr (Type == weight_type::iq2_s) {
        unpack_2_s(x, lattice, use);
    } else if constexpr (Type == weight_type::iq3_xxs) {
        unpack_3_xxs(x, lattice, use);
    } else if constexpr (Type == weight_type::iq3_s) {
        unpack_3_s(x, lattice, use);
    } else if constexpr (Type == weight_type::tq1_0) {
        unpack_t1_0(x, use);
    } else if constexpr (Type == weight_type::tq2_0) {
        unpack_t2_0(x, use);
    } else if constexpr (Type == weight_type::nvfp4) {
        unpack_nvfp4(x, use);
    } else if constexpr (Type == weight_type::q1_0) {
        unpack_1_0(x, use);
    } else if constexpr (Type == weight_type::q2_0) {
        unpack_2_0(x, use);
    } else {
        static_assert(Type == weight_type::iq4_xs, "a function for each type");
        unpack_4_xs(x, use);
    }
}

// ---- products --------------------------------------------------------------------------------------------------------------

// Sums of products of a row of the matrix and N rows of x. Partial sum i % 32 adds element i, for any vector width and
// any number of rows, so that all compute the same bits.
template <int N> struct sums {
    static constexpr int PARTS = 32 / WIDTH;

    floats part[N][PARTS];

    INLINE sums() {
        for (auto & row : part) {
            for (floats & one : row) {
                one = all(0.0f);
            }
        }
    }

    // Adds the products of elements `first` to `first + WIDTH - 1` with the N rows at `x`, which are `k` numbers apart.
    INLINE void add(int first, floats w, const float * x, size_t k) {
        for (int i = 0; i < N; i++) {
            floats & one = part[i][first / WIDTH % PARTS];
            one          = multiplied_added(w, loaded(x + static_cast<size_t>(i) * k), one);
        }
    }

    INLINE float sum(int i) const {
        alignas(64) float sixteen[16];
        for (int j = 0; j < 16 / WIDTH; j++) {
            stored(sixteen + j * WIDTH, added(part[i][j], part[i][j + PARTS / 2]));
        }
        for (int n = 8; n > 0; n /= 2) {
            for (int j = 0; j < n; j++) {
                sixteen[j] += sixteen[n + j];
            }
        }
        return sixteen[0];
    }
};

// Multiplies elements while they are unpacked.
struct multiplied_at_once {
    sums<1>       total;
    const float * x;  // the block's first element

    INLINE explicit multiplied_at_once(const float * row) : x(row) {}

    INLINE void operator()(int first, floats w) { total.add(first, w, x + first, 0); }
};

// Writes unpacked elements.
struct written {
    float * y;  // the block's first element

    INLINE void operator()(int first, floats w) { stored(y + first, w); }
};

// Multiplies an unpacked row of the matrix with the rows of x from `i` on, N at a time. Returns the first row that is
// left.
template <int N> INLINE size_t multiply(const weight_product & t, const float * elements, size_t row, size_t i) {
    for (; i + N <= t.n; i += N) {
        sums<N> total;
        for (size_t j = 0; j < t.k; j += 32) {
            for (int part = 0; part < 32; part += WIDTH) {
                total.add(part, loaded(elements + j + part), t.x + i * t.k + j + part, t.k);
            }
        }
        for (int k = 0; k < N; k++) {
            t.y[(i + k) * t.m + row] = total.sum(k);
        }
    }
    return i;
}

TARGET static void multiply_row(const weight_product & t, const float * elements, size_t row) {
    size_t i = multiply<WIDTH / 4>(t, elements, row, 0);  // as many rows as registers allow
    i        = multiply<2>(t, elements, row, i);
    multiply<1>(t, elements, row, i);
}

template <weight_type Type> TARGET static void product(const weight_product & t, size_t begin, size_t end) {
    constexpr weight_block BLOCK  = block_of(Type);
    const size_t           blocks = t.k / BLOCK.elements;
    std::vector<float>     elements(t.n > 1 ? t.k : 0);
    for (size_t row = begin; row < end; row++) {
        const uint8_t * w = t.weights + row * blocks * BLOCK.bytes;
        if (t.n == 1) {
            multiplied_at_once one(t.x);
            for (size_t b = 0; b < blocks; b++, w += BLOCK.bytes, one.x += BLOCK.elements) {
                unpack<Type>(w, t.lattice, one);
            }
            t.y[row] = one.total.sum(0);
            continue;
        }
        written all_of_row{ elements.data() };
        for (size_t b = 0; b < blocks; b++, w += BLOCK.bytes, all_of_row.y += BLOCK.elements) {
            unpack<Type>(w, t.lattice, all_of_row);
        }
        multiply_row(t, elements.data(), row);
    }
}

static weight_function function_of(weight_type type) {
    switch (type) {
        case weight_type::q4_0:
            return product<weight_type::q4_0>;
        case weight_type::q4_1:
            return product<weight_type::q4_1>;
        case weight_type::q5_0:
            return product<weight_type::q5_0>;
        case weight_type::q5_1:
            return product<weight_type::q5_1>;
        case weight_type::q8_0:
            return product<weight_type::q8_0>;
        case weight_type::q2_K:
            return product<weight_type::q2_K>;
        case weight_type::q3_K:
            return product<weight_type::q3_K>;
        case weight_type::q4_K:
            return product<weight_type::q4_K>;
        case weight_type::q5_K:
            return product<weight_type::q5_K>;
        case weight_type::q6_K:
            return product<weight_type::q6_K>;
        case weight_type::iq4_nl:
            return product<weight_type::iq4_nl>;
        case weight_type::iq4_xs:
            return product<weight_type::iq4_xs>;
        case weight_type::mxfp4:
            return product<weight_type::mxfp4>;
        case weight_type::iq1_s:
            return product<weight_type::iq1_s>;
        case weight_type::iq1_m:
            return product<weight_type::iq1_m>;
        case weight_type::iq2_xxs:
            return product<weight_type::iq2_xxs>;
        case weight_type::iq2_xs:
            return product<weight_type::iq2_xs>;
        case weight_type::iq2_s:
            return product<weight_type::iq2_s>;
        case weight_type::iq3_xxs:
            return product<weight_type::iq3_xxs>;
        case weight_type::iq3_s:
            return product<weight_type::iq3_s>;
        case weight_type::tq1_0:
            return product<weight_type::tq1_0>;
        case weight_type::tq2_0:
            return product<weight_type::tq2_0>;
        case weight_type::nvfp4:
            return product<weight_type::nvfp4>;
        case weight_type::q1_0:
            return product<weight_type::q1_0>;
        case weight_type::q2_0:
            return product<weight_type::q2_0>;
    }
    return nullptr;
}
