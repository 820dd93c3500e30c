// Code that test programs share: reporting failures, and reading results.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <stdexcept>
#include <string>
#include <vector>

[[noreturn]] inline void fail(const std::string & message) {
    throw std::runtime_error(message);
}

inline void check(bool condition, const std::string & message) {
    if (!condition) {
        fail(message);
    }
}

// Returns the elements of an F32 or F16 tensor.
inline std::vector<float> read(const ggml_tensor * t) {
    std::vector<float> values((size_t) ggml_nelements(t));
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<ggml_fp16_t> halves(values.size());
        ggml_backend_tensor_get(t, halves.data(), 0, ggml_nbytes(t));
        ggml_fp16_to_fp32_row(halves.data(), values.data(), (int64_t) halves.size());
    }
    return values;
}
