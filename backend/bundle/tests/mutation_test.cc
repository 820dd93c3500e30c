// Opens packs with many kinds of damage: each gives an error, or a bundle whose every byte can be read.
//
// Run it with AddressSanitizer and UndefinedBehaviorSanitizer: without them it proves little.

#include "check.h"
#include "neuron_kernels.h"
#include "pack_builder.h"
#include "read_everything.h"

#include <cinttypes>
#include <cstring>
#include <memory>
#include <random>

static uint64_t n_opened  = 0;
static uint64_t n_refused = 0;

// Opens bytes in a heap block of exactly their size, where the sanitizer detects a read past the end.
static neuron_kernels_status try_pack(const std::string & bytes) {
    const std::unique_ptr<char[]> block(new char[bytes.size()]);
    memcpy(block.get(), bytes.data(), bytes.size());
    char                        message[NEURON_KERNELS_MESSAGE_SIZE] = "";
    neuron_kernels *            bundle                               = nullptr;
    const neuron_kernels_status status =
        neuron_kernels_open_memory(block.get(), bytes.size(), &bundle, message, sizeof(message));
    if (status == NEURON_KERNELS_OK) {
        n_opened++;
        CHECK(bundle != nullptr);
        test::read_everything(bundle);
    } else {
        n_refused++;
        CHECK(bundle == nullptr);
        CHECK_MSG(strlen(message) > strlen("pack in memory: "), "'%s'", message);
        CHECK(status == NEURON_KERNELS_ERROR_NOT_A_PACK || status == NEURON_KERNELS_ERROR_VERSION ||
              status == NEURON_KERNELS_ERROR_CORRUPT);
    }
    neuron_kernels_close(bundle);
    return status;
}

// The places of a good pack's parts.
struct layout {
    struct field {
        size_t offset;
        size_t size;
    };

    std::vector<field> fields;    // every number that determines how the rest is read, and the index's own
    size_t             data = 0;  // start of the tensor data
    size_t             end  = 0;  // end of the last NEFF, before its padding
};

// The file must be a good pack: nothing is checked.
static layout find_layout(const std::string & bytes) {
    layout     out;
    size_t     at   = 8;
    const auto take = [&](size_t size) {
        uint64_t value = 0;
        memcpy(&value, &bytes[at], size);
        out.fields.push_back({ at, size });
        at += size;
        return value;
    };
    out.fields.push_back({ 4, 4 });
    const uint64_t n_tensors   = take(8);
    const uint64_t n_values    = take(8);
    const auto     take_string = [&] {
        at += take(8);
    };
    const size_t sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    for (uint64_t i = 0; i < n_values; i++) {
        take_string();
        uint64_t type  = take(4);
        uint64_t count = 1;
        if (type == test::ARRAY) {
            type  = take(4);
            count = take(8);
        }
        for (uint64_t j = 0; j < count; j++) {
            if (type == test::STRING) {
                take_string();
            } else {
                take(sizes[type]);
            }
        }
    }
    uint64_t last = 0;
    for (uint64_t i = 0; i < n_tensors; i++) {
        take_string();
        take(4);
        const uint64_t size = take(8);
        take(4);
        last = take(8) + size;
    }
    out.data = (at + 63) & ~size_t(63);
    out.end  = out.data + last;
    return out;
}

static void test_truncation(const std::string & bytes, const layout & where) {
    // Every length in the metadata; in the data, where only sizes matter, every 997th.
    for (size_t size = 0; size < bytes.size(); size += size < where.data + 256 ? 1 : 997) {
        const bool complete = size >= where.end;
        CHECK_MSG((try_pack(bytes.substr(0, size)) == NEURON_KERNELS_OK) == complete, "%zu bytes", size);
    }
    CHECK(try_pack(bytes.substr(0, where.end - 1)) != NEURON_KERNELS_OK);
    CHECK(try_pack(bytes.substr(0, where.end)) == NEURON_KERNELS_OK);
}

// Replaces every number in the metadata, one at a time, by each of several dangerous values.
static void test_numbers(const std::string & bytes, const layout & where, size_t max_fields) {
    const size_t step = where.fields.size() / max_fields + 1;
    for (size_t i = 0; i < where.fields.size(); i += step) {
        const layout::field & field = where.fields[i];
        uint64_t              old   = 0;
        memcpy(&old, &bytes[field.offset], field.size);
        for (const uint64_t value : {
                 uint64_t(0),
                 uint64_t(1),
                 uint64_t(2),
                 uint64_t(8),
                 uint64_t(9),
                 old - 1,
                 old + 1,
                 old * 2,
                 old ^ 0x80,
                 uint64_t(bytes.size()),
                 uint64_t(bytes.size() - field.offset),
                 uint64_t(INT32_MAX),
                 uint64_t(UINT32_MAX),
                 uint64_t(1) << 32,
                 uint64_t(1) << 61,
                 uint64_t(INT64_MAX),
                 uint64_t(1) << 63,
                 UINT64_MAX - 7,
                 UINT64_MAX,
                 UINT64_MAX - field.offset,
                 uint64_t(0) - field.offset,
             }) {
            std::string changed = bytes;
            memcpy(&changed[field.offset], &value, field.size);
            try_pack(changed);
        }
    }
}

static void test_random_damage(const std::string & bytes, const layout & where) {
    std::mt19937_64 random(1);
    const auto      below = [&](uint64_t n) {
        return static_cast<size_t>(random() % n);
    };
    for (uint64_t round = 0; round < 4000; round++) {
        std::string  changed = bytes;
        // The library does not check NEFF bytes when it opens a pack, so nearly all damage goes to the structure.
        const size_t range   = below(20) == 0 ? changed.size() : where.data;
        switch (below(4)) {
            case 0:  // a few bits
                for (size_t i = below(8) + 1; i > 0; i--) {
                    changed[below(range)] ^= static_cast<char>(1 << below(8));
                }
                break;
            case 1:  // a few bytes
                for (size_t i = below(16) + 1; i > 0; i--) {
                    changed[below(range)] = static_cast<char>(below(256));
                }
                break;
            case 2:  // lost bytes
                changed.erase(below(range), below(64) + 1);
                break;
            case 3:  // bytes that are repeated at another place
                changed.insert(below(range), bytes.substr(below(range), below(64) + 1));
                break;
        }
        try_pack(changed);
    }
}

int main() {
    test::pack pack = test::make_pack(test::sample_kernels());
    test::add_memory(pack);
    const std::string packs[] = { pack.bytes(), test::make_pack(test::sample_graphs()).bytes() };
    for (const std::string & bytes : packs) {
        CHECK(try_pack(bytes) == NEURON_KERNELS_OK);
        if (n_failures() > 0) {
            break;
        }
        const layout where = find_layout(bytes);
        test_truncation(bytes, where);
        test_numbers(bytes, where, 2000);
        test_random_damage(bytes, where);
    }
    printf("%" PRIu64 " packs refused, %" PRIu64 " opened and read\n", n_refused, n_opened);
    return test_result();
}
