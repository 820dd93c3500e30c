#include "attention.h"

namespace simulator {

namespace {

// Parses the numbers of a call; a space follows each.
struct options {
    size_t sums, type, heads, rows, cells, depth, head_stride, cell_stride, update_size, vectors;

    options(const char * text, size_t size) {
        size_t * const numbers[] = { &sums,  &type,        &heads,       &rows,        &cells,
                                     &depth, &head_stride, &cell_stride, &update_size, &vectors };
        size_t         at        = 0;
        for (size_t * number : numbers) {
            *number = 0;
            for (; at < size && text[at] != ' '; at++) {
                *number = *number * 10 + static_cast<size_t>(text[at] - '0');
            }
            at++;
        }
    }
};

}  // namespace

}  // namespace simulator

using namespace simulator;

extern "C" int nrt_simulator_vectors();

// Computes products of a cache's vectors (first operand) and rows (second operand, f32). If `update_size` is not 0,
// there are two more operands: the third replaces a part of the cache, and the fourth, an s64, is the element at which
// that part begins. Requires a processor with AVX2, FMA and F16C.
extern "C" void nrt_simulator_attention(void * out, const void ** in, const char * text, size_t size, void *) {
    static const bool has_avx512 = nrt_simulator_vectors() == 16;
    const options     asked(text, size);
    cache_product     product = { static_cast<const uint8_t *>(in[0]),
                                  nullptr,
                                  0,
                                  asked.update_size,
                                  static_cast<const float *>(in[1]),
                                  static_cast<float *>(out),
                                  asked.heads,
                                  asked.rows,
                                  asked.cells,
                                  asked.depth,
                                  asked.head_stride,
                                  asked.cell_stride };
    if (asked.update_size != 0) {
        product.update       = static_cast<const uint8_t *>(in[2]);
        product.update_first = static_cast<size_t>(*static_cast<const int64_t *>(in[3]));
    }
    const auto            type      = static_cast<cache_type>(asked.type);
    const bool            wide      = has_avx512 && asked.vectors == 0;
    const cache_functions functions = wide ? avx512_attention(type) : avx2_attention(type);
    (asked.sums != 0 ? functions.sums : functions.scores)(product);
}
