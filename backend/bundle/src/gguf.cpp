#include "gguf.h"

#include <cinttypes>
#include <cstring>
#include <unordered_set>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "packs are little-endian, and this reader does not convert them"
#endif

namespace nk {

namespace {

constexpr uint32_t VERSION           = 3;
constexpr uint32_t DEFAULT_ALIGNMENT = 32;
constexpr uint32_t TYPE_I8           = 24;  // GGML_TYPE_I8
constexpr size_t   MAX_TENSOR_NAME   = 63;  // GGML_MAX_NAME with its NUL

// Returns the bytes of one value, or 0 for strings, arrays and numbers of no type.
uint64_t type_size(uint32_t type) {
    switch (type) {
        case GGUF_UINT8:
        case GGUF_INT8:
        case GGUF_BOOL:
            return 1;
        case GGUF_UINT16:
        case GGUF_INT16:
            return 2;
        case GGUF_UINT32:
        case GGUF_INT32:
        case GGUF_FLOAT32:
            return 4;
        case GGUF_UINT64:
        case GGUF_INT64:
        case GGUF_FLOAT64:
            return 8;
        default:
            return 0;
    }
}

const char * type_name(uint32_t type) {
    static const char * const NAMES[] = { "u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                          "bool", "string", "array", "u64", "i64", "f64" };
    return type < sizeof(NAMES) / sizeof(NAMES[0]) ? NAMES[type] : "unknown type";
}

template <typename T> T load(const uint8_t * data) {
    T value;
    memcpy(&value, data, sizeof(T));
    return value;
}

// The reader's position. Every step first checks that the bytes are in the file.
class cursor {
  public:
    cursor(const uint8_t * data, size_t size) : data(data), size(size) {}

    uint64_t offset() const { return at; }

    uint64_t left() const { return size - at; }

    // Returns the next `n` bytes.
    const uint8_t * take(uint64_t n, const char * what) {
        if (n > left()) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "truncated or corrupt: %s at byte %zu takes %" PRIu64 " bytes, and the file ends after %" PRIu64, what,
                 at, n, left());
        }
        const uint8_t * here = data + at;
        at += static_cast<size_t>(n);
        return here;
    }

    // Returns the next `count` items of `item` bytes; the product may overflow.
    const uint8_t * take_array(uint64_t count, uint64_t item, const char * what) {
        if (count > left() / item) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "truncated or corrupt: %s at byte %zu has %" PRIu64 " items of %" PRIu64
                 " bytes, and the file ends after %" PRIu64,
                 what, at, count, item, left());
        }
        return take(count * item, what);
    }

    uint32_t u32(const char * what) { return load<uint32_t>(take(4, what)); }

    uint64_t u64(const char * what) { return load<uint64_t>(take(8, what)); }

    std::string_view string(const char * what) {
        const uint64_t  length = u64(what);
        const uint8_t * bytes  = take(length, what);
        return { reinterpret_cast<const char *>(bytes), static_cast<size_t>(length) };
    }

  private:
    const uint8_t * data;
    size_t          size;
    size_t          at = 0;
};

gguf_value read_value(cursor & in) {
    const uint64_t start = in.offset();
    gguf_value     value{};
    value.key = in.string("a metadata key");
    if (value.key.empty()) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata key at byte %" PRIu64 " is empty", start);
    }
    // The value's name in a message. It is formatted for each of the few dozen keys.
    const std::string what = "metadata " + quoted(value.key);

    uint32_t type = in.u32(what.c_str());
    value.array   = type == GGUF_ARRAY;
    value.count   = 1;
    if (value.array) {
        type        = in.u32(what.c_str());
        value.count = in.u64(what.c_str());
    }
    value.type   = static_cast<gguf_type>(type);
    value.offset = in.offset();
    if (type == GGUF_STRING) {
        value.data = in.take(0, what.c_str());
        for (uint64_t i = 0; i < value.count; i++) {
            in.string(what.c_str());
        }
    } else if (const uint64_t item = type_size(type)) {
        value.data = in.take_array(value.count, item, what.c_str());
        for (uint64_t i = 0; type == GGUF_BOOL && i < value.count; i++) {
            if (value.data[i] > 1) {
                fail(NEURON_KERNELS_ERROR_CORRUPT, "%s at byte %" PRIu64 " is %d; expected a bool, 0 or 1",
                     what.c_str(), value.offset + i, value.data[i]);
            }
        }
    } else {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "%s at byte %" PRIu64 " has type %" PRIu32 ", which GGUF does not have%s",
             what.c_str(), value.offset, type, value.array ? " for the items of an array" : "");
    }
    return value;
}

uint32_t read_alignment(const gguf_file & file) {
    if (!file.find("general.alignment")) {
        return DEFAULT_ALIGNMENT;
    }
    const uint32_t alignment = file.u32("general.alignment");
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata 'general.alignment' is %" PRIu32 ", not a power of two",
             alignment);
    }
    return alignment;
}

}  // namespace

gguf_file gguf_read(const uint8_t * data, size_t size) {
    cursor in(data, size);
    if (size == 0) {
        fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "empty; expected a GGUF file");
    }
    if (size < 4 || memcmp(in.take(4, "the magic number"), "GGUF", 4) != 0) {
        fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "not a GGUF file: it does not start with the bytes 'GGUF'");
    }
    const uint32_t version = in.u32("the version");
    if (version != VERSION) {
        const bool big_endian = version == __builtin_bswap32(VERSION);
        fail(NEURON_KERNELS_ERROR_VERSION, "a GGUF file %s %" PRIu32 "; expected version %" PRIu32 "%s",
             big_endian ? "with its bytes swapped, version" : "of version", big_endian ? VERSION : version, VERSION,
             big_endian ? ", little-endian" : "");
    }
    const uint64_t n_tensors = in.u64("the number of tensors");
    const uint64_t n_values  = in.u64("the number of metadata values");

    gguf_file                            file;
    std::unordered_set<std::string_view> names;
    // The counts size no allocation: each value and tensor must first be found in the file.
    for (uint64_t i = 0; i < n_values; i++) {
        const uint64_t start = in.offset();
        file.values.push_back(read_value(in));
        if (!names.insert(file.values.back().key).second) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata %s at byte %" PRIu64 " is a duplicate",
                 quoted(file.values.back().key).c_str(), start);
        }
    }

    const uint64_t        alignment = read_alignment(file);
    std::vector<uint64_t> offsets;
    uint64_t              end = 0;  // end of the tensors so far, from the start of the data, padded
    names.clear();
    for (uint64_t i = 0; i < n_tensors; i++) {
        const uint64_t start = in.offset();
        gguf_tensor    tensor{};
        tensor.name            = in.string("a tensor's name");
        const std::string name = quoted(tensor.name);
        if (tensor.name.empty() || tensor.name.size() > MAX_TENSOR_NAME) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "tensor name %s at byte %" PRIu64 " has %zu bytes; expected 1 to %zu",
                 name.c_str(), start, tensor.name.size(), MAX_TENSOR_NAME);
        }
        if (!names.insert(tensor.name).second) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "tensor %s at byte %" PRIu64 " is a duplicate", name.c_str(), start);
        }
        const uint32_t n_dims = in.u32("a tensor's number of dimensions");
        if (n_dims != 1) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "tensor %s at byte %" PRIu64 " has %" PRIu32 " dimensions; expected 1",
                 name.c_str(), start, n_dims);
        }
        tensor.size         = in.u64("a tensor's size");
        const uint32_t type = in.u32("a tensor's type");
        if (type != TYPE_I8) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "tensor %s at byte %" PRIu64 " has type %" PRIu32 "; expected I8 (%" PRIu32 ")", name.c_str(), start,
                 type, TYPE_I8);
        }
        const uint64_t offset = in.u64("a tensor's offset");
        if (offset != end) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "tensor %s at byte %" PRIu64 " has its data at offset %" PRIu64 "; expected %" PRIu64
                 ", after the tensor before it",
                 name.c_str(), start, offset, end);
        }
        if (tensor.size == 0 || tensor.size > size || end > size) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "truncated or corrupt: tensor %s at byte %" PRIu64 " has %" PRIu64 " bytes at offset %" PRIu64
                 ", in a file of %zu bytes",
                 name.c_str(), start, tensor.size, offset, size);
        }
        // No overflow: both are at most the file's size, far below 2^64, and alignment is below 2^32.
        end = (end + tensor.size + alignment - 1) & ~(alignment - 1);
        offsets.push_back(offset);
        file.tensors.push_back(tensor);
    }

    const uint64_t base = (in.offset() + alignment - 1) & ~(alignment - 1);
    for (size_t i = 0; i < offsets.size(); i++) {
        gguf_tensor &  tensor = file.tensors[i];
        const uint64_t start  = base + offsets[i];
        if (start > size || tensor.size > size - start) {
            fail(NEURON_KERNELS_ERROR_CORRUPT,
                 "truncated: tensor %s has bytes %" PRIu64 " to %" PRIu64 ", and the file has %zu",
                 quoted(tensor.name).c_str(), start, start + tensor.size, size);
        }
        tensor.data = data + start;
    }
    return file;
}

std::string_view gguf_next_string(const uint8_t *& data) {
    const uint64_t   length = load<uint64_t>(data);
    std::string_view text(reinterpret_cast<const char *>(data + 8), static_cast<size_t>(length));
    data += 8 + length;
    return text;
}

const gguf_value * gguf_file::find(std::string_view key) const {
    for (const gguf_value & value : values) {
        if (value.key == key) {
            return &value;
        }
    }
    return nullptr;
}

const gguf_value & gguf_file::get(std::string_view key, gguf_type type, bool array) const {
    const gguf_value * value = find(key);
    if (!value) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata %s is missing", quoted(key).c_str());
    }
    if (value->type != type || value->array != array) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata %s at byte %" PRIu64 " is %s%s; expected %s%s",
             quoted(key).c_str(), value->offset, value->array ? "an array of " : "", type_name(value->type),
             array ? "an array of " : "", type_name(type));
    }
    return *value;
}

uint32_t gguf_file::u32(std::string_view key) const {
    return load<uint32_t>(get(key, GGUF_UINT32, false).data);
}

bool gguf_file::boolean(std::string_view key) const {
    return *get(key, GGUF_BOOL, false).data == 1;
}

std::string_view gguf_file::string(std::string_view key) const {
    const uint8_t * data = get(key, GGUF_STRING, false).data;
    return gguf_next_string(data);
}

std::vector<uint32_t> gguf_file::u32_array(std::string_view key) const {
    const gguf_value &    value = get(key, GGUF_UINT32, true);
    std::vector<uint32_t> out(static_cast<size_t>(value.count));
    if (!out.empty()) {
        memcpy(out.data(), value.data, out.size() * sizeof(out[0]));
    }
    return out;
}

std::vector<uint64_t> gguf_file::u64_array(std::string_view key) const {
    const gguf_value &    value = get(key, GGUF_UINT64, true);
    std::vector<uint64_t> out(static_cast<size_t>(value.count));
    if (!out.empty()) {
        memcpy(out.data(), value.data, out.size() * sizeof(out[0]));
    }
    return out;
}

}  // namespace nk
