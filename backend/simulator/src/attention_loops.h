// Products of attention for any vector width. Each file that includes this header defines, in its own namespace,
// `sixteen` (16 float32 numbers) and the operations on it. TARGET is the attribute of functions that use the
// instruction set; INLINE is the attribute of functions that are always inlined into them.
//
// Numbers are converted to float32, which is exact. A score is the sum of 16 partial sums; partial sum k adds the
// elements i with i % 16 = k, and the partial sums are added in pairs. A weighted sum adds the cells in their order. So
// the bits depend neither on the vector width nor on the number of rows.

static constexpr size_t SCORE_CELLS = 4;   // whose scores are computed together
static constexpr size_t SUM_CELLS   = 16;  // added up before the sum is written

// Prefetches the data that is read AHEAD cells later: a vector is too short for the processor's prefetcher to detect
// the stride.
static constexpr size_t AHEAD = 16;

INLINE void ask_for(const void * at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch(static_cast<const char *>(at) + i, _MM_HINT_T0);
    }
}

// Vectors of some cells of a head, as float32 where several rows use them.
template <typename Element, size_t Cells> struct vectors_of {
    const Element * at[Cells];

    INLINE vectors_of(const cache_product & t, size_t head, size_t first) {
        for (size_t i = 0; i < Cells; i++) {
            at[i] = t.at<Element>(head, std::min(first + i, t.cells - 1));
            ask_for(t.at<Element>(head, std::min(first + i + AHEAD, t.cells - 1)), t.depth * sizeof(Element));
        }
    }

    vectors_of() = default;

    INLINE vectors_of<float, Cells> converted(float * room, size_t depth) const {
        vectors_of<float, Cells> out;
        for (size_t i = 0; i < Cells; i++) {
            for (size_t d = 0; d < depth; d += 16) {
                stored(room + i * depth + d, loaded(at[i] + d));
            }
            out.at[i] = room + i * depth;
        }
        return out;
    }
};

// Returns the scores of a row and four cells.
template <typename Element>
INLINE __m128 four_scores(const vectors_of<Element, SCORE_CELLS> & keys, const float * x, size_t depth) {
    sixteen parts[SCORE_CELLS];
    for (auto & one : parts) {
        one = zeros();
    }
    for (size_t d = 0; d < depth; d += 16) {
        const sixteen row = loaded(x + d);
        for (size_t i = 0; i < SCORE_CELLS; i++) {
            parts[i] = multiplied_added(loaded(keys.at[i] + d), row, parts[i]);
        }
    }
    const __m256 first  = _mm256_hadd_ps(halves_added(parts[0]), halves_added(parts[1]));
    const __m256 second = _mm256_hadd_ps(halves_added(parts[2]), halves_added(parts[3]));
    const __m256 both   = _mm256_hadd_ps(first, second);
    return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
}

template <typename Element>
INLINE void scores_of_cells(const cache_product &                    t,
                            const vectors_of<Element, SCORE_CELLS> & keys,
                            size_t                                   head,
                            size_t                                   cell) {
    for (size_t row = head * t.rows; row < (head + 1) * t.rows; row++) {
        const __m128 four = four_scores(keys, t.x + row * t.depth, t.depth);
        float *      y    = t.y + row * t.cells + cell;
        if (cell + SCORE_CELLS <= t.cells) {
            _mm_storeu_ps(y, four);
        } else {
            float some[SCORE_CELLS];
            _mm_storeu_ps(some, four);
            std::memcpy(y, some, (t.cells - cell) * sizeof(float));
        }
    }
}

template <typename Element> TARGET static void scores(const cache_product & t) {
    std::vector<float> room(t.rows > 1 ? SCORE_CELLS * t.depth : 0);
    // Cells are the outer loop, so the cache is read from beginning to end.
    for (size_t cell = 0; cell < t.cells; cell += SCORE_CELLS) {
        for (size_t head = 0; head < t.heads; head++) {
            const vectors_of<Element, SCORE_CELLS> keys(t, head, cell);
            if (t.rows > 1) {
                scores_of_cells(t, keys.converted(room.data(), t.depth), head, cell);
            } else {
                scores_of_cells(t, keys, head, cell);
            }
        }
    }
}

// Adds the vectors of some cells, each times its weight, to 16 * N elements of a sum.
template <int N, typename Element>
INLINE void add_cells(const vectors_of<Element, SUM_CELLS> & values,
                      size_t                                 cells,
                      const float *                          x,
                      float *                                y,
                      size_t                                 d) {
    sixteen total[N];
    for (int i = 0; i < N; i++) {
        total[i] = loaded(y + d + 16 * i);
    }
    for (size_t cell = 0; cell < cells; cell++) {
        const sixteen weight = all(x[cell]);
        for (int i = 0; i < N; i++) {
            total[i] = multiplied_added(loaded(values.at[cell] + d + 16 * i), weight, total[i]);
        }
    }
    for (int i = 0; i < N; i++) {
        stored(y + d + 16 * i, total[i]);
    }
}

template <typename Element>
INLINE void sums_of_cells(const cache_product &                  t,
                          const vectors_of<Element, SUM_CELLS> & values,
                          size_t                                 head,
                          size_t                                 cell) {
    const size_t cells = std::min(SUM_CELLS, t.cells - cell);
    for (size_t row = head * t.rows; row < (head + 1) * t.rows; row++) {
        const float * x = t.x + row * t.cells + cell;
        float *       y = t.y + row * t.depth;
        size_t        d = 0;
        for (; d + 64 <= t.depth; d += 64) {
            add_cells<4>(values, cells, x, y, d);
        }
        for (; d < t.depth; d += 16) {
            add_cells<1>(values, cells, x, y, d);
        }
    }
}

template <typename Element> TARGET static void sums(const cache_product & t) {
    std::vector<float> room(t.rows > 1 ? SUM_CELLS * t.depth : 0);
    std::fill(t.y, t.y + t.heads * t.rows * t.depth, 0.0f);
    for (size_t cell = 0; cell < t.cells; cell += SUM_CELLS) {
        for (size_t head = 0; head < t.heads; head++) {
            const vectors_of<Element, SUM_CELLS> values(t, head, cell);
            if (t.rows > 1) {
                sums_of_cells(t, values.converted(room.data(), t.depth), head, cell);
            } else {
                sums_of_cells(t, values, head, cell);
            }
        }
    }
}

static cache_functions functions_of(cache_type type) {
    switch (type) {
        case cache_type::f16:
            return { scores<half>, sums<half> };
        case cache_type::bf16:
            return { scores<bfloat16>, sums<bfloat16> };
        case cache_type::f32:
            return { scores<float>, sums<float> };
    }
    return {};
}
