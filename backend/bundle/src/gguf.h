// A reader of GGUF version 3 files that trusts nothing in them.
//
// It finds the metadata values and the tensors. It checks that all of them are inside the file, that names are unique,
// and that tensors follow each other as ggml's own reader requires. It copies no values and interprets only the key
// `general.alignment`.

#pragma once

#include "error.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace nk {

// `enum gguf_type` in ggml's gguf.h
enum gguf_type : uint32_t {
    GGUF_UINT8   = 0,
    GGUF_INT8    = 1,
    GGUF_UINT16  = 2,
    GGUF_INT16   = 3,
    GGUF_UINT32  = 4,
    GGUF_INT32   = 5,
    GGUF_FLOAT32 = 6,
    GGUF_BOOL    = 7,
    GGUF_STRING  = 8,
    GGUF_ARRAY   = 9,
    GGUF_UINT64  = 10,
    GGUF_INT64   = 11,
    GGUF_FLOAT64 = 12,
};

// A metadata value, or an array of them. All views point into the file, which is not aligned.
struct gguf_value {
    std::string_view key;
    gguf_type        type;    // of the value, or of the array's items; never GGUF_ARRAY
    bool             array;
    uint64_t         count;   // items; 1 when this is not an array
    const uint8_t *  data;    // the items' bytes in the file: a string has a u64 length in front
    uint64_t         offset;  // of `data` in the file, for messages
};

struct gguf_tensor {
    std::string_view name;
    const uint8_t *  data;
    uint64_t         size;  // bytes
};

struct gguf_file {
    std::vector<gguf_value>  values;
    std::vector<gguf_tensor> tensors;

    // Returns the value. Throws `error` unless it exists, has `type`, and is an array exactly when `array` is true.
    const gguf_value & get(std::string_view key, gguf_type type, bool array) const;

    // Returns the value, or nullptr.
    const gguf_value * find(std::string_view key) const;

    uint32_t         u32(std::string_view key) const;
    bool             boolean(std::string_view key) const;
    std::string_view string(std::string_view key) const;

    // Calls `each(string, index)` for the items of an array of strings.
    template <typename F> const gguf_value & strings(std::string_view key, F each) const;

    // Returns a copy of an array of numbers. The copy is aligned, the array in the file is not.
    std::vector<uint32_t> u32_array(std::string_view key) const;
    std::vector<uint64_t> u64_array(std::string_view key) const;
};

// Reads a file whose tensors are all one-dimensional and of type I8, as in a pack.
gguf_file gguf_read(const uint8_t * data, size_t size);

// Returns the item at `data` and moves past it. The reader has already checked its bounds.
std::string_view gguf_next_string(const uint8_t *& data);

template <typename F> const gguf_value & gguf_file::strings(std::string_view key, F each) const {
    const gguf_value & value = get(key, GGUF_STRING, true);
    const uint8_t *    next  = value.data;
    for (uint64_t i = 0; i < value.count; i++) {
        each(gguf_next_string(next), i);
    }
    return value;
}

}  // namespace nk
