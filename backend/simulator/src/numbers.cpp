#include "numbers.h"

#include <cstring>

namespace simulator {

// A float is a NaN when all bits of its exponent are set and its fraction is not 0: without its sign, its bits are then
// larger than infinity's. The loop has no branch, so that the compiler can vectorize it.
template <typename T> static bool any_above(const uint8_t * data, size_t size, T infinity) {
    constexpr size_t BLOCK = 4096 / sizeof(T);
    const T          sign  = static_cast<T>(T(1) << (8 * sizeof(T) - 1));
    const size_t     n     = size / sizeof(T);
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        const size_t end = begin + BLOCK < n ? begin + BLOCK : n;
        unsigned     any = 0;
        for (size_t i = begin; i < end; i++) {
            T bits;
            memcpy(&bits, data + i * sizeof(T), sizeof(T));
            any |= static_cast<T>(bits & static_cast<T>(~sign)) > infinity;
        }
        if (any != 0) {
            return true;
        }
    }
    return false;
}

size_t bytes_of(nrt_dtype_t type) {
    switch (type) {
        case NRT_DTYPE_UINT64:
        case NRT_DTYPE_INT64:
            return 8;
        case NRT_DTYPE_INT32:
        case NRT_DTYPE_UINT32:
        case NRT_DTYPE_FLOAT32:
            return 4;
        case NRT_DTYPE_INT16:
        case NRT_DTYPE_UINT16:
        case NRT_DTYPE_BFLOAT16:
        case NRT_DTYPE_FLOAT16:
            return 2;
        default:
            return 1;
    }
}

bool holds_nan(nrt_dtype_t type, const uint8_t * data, size_t size) {
    switch (type) {
        case NRT_DTYPE_FLOAT32:
            return any_above<uint32_t>(data, size, 0x7F800000);
        case NRT_DTYPE_FLOAT16:
            return any_above<uint16_t>(data, size, 0x7C00);
        case NRT_DTYPE_BFLOAT16:
            return any_above<uint16_t>(data, size, 0x7F80);
        default:
            return false;
    }
}

}  // namespace simulator
