// The C API: opens bundles and looks kernels up in them.

#include "bundle.h"

#include "ascii.h"
#include "error.h"
#include "hash.h"
#include "key.h"

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

//
// code that all forms of a bundle share
//

void neuron_kernels::make_table(bool simulated, uint32_t lnc, const uint8_t * neff_data) {
    table.struct_size  = sizeof(table);
    table.format       = NEURON_KERNELS_FORMAT;
    table.simulated    = simulated;
    table.lnc          = lnc;
    table.n_kernels    = static_cast<uint32_t>(id_offsets.size());
    table.n_neffs      = static_cast<uint32_t>(neff_sizes.size());
    table.n_slots      = static_cast<uint32_t>(slots.size());
    table.name         = name.c_str();
    table.target       = target.c_str();
    table.compiler     = compiler.c_str();
    table.flags        = flags.c_str();
    table.version      = version.c_str();
    table.jax_version  = jax_version.c_str();
    table.ids          = ids.c_str();
    table.id_offsets   = id_offsets.data();
    table.hlo_sha256   = hlo_sha256.c_str();
    table.kernel_neff  = kernel_neff.data();
    table.key_words    = key_words.data();
    table.key_offsets  = key_offsets.data();
    table.slots        = slots.data();
    table.neff_data    = neff_data;
    table.neff_offsets = neff_offsets.data();
    table.neff_sizes   = neff_sizes.data();
    table.neff_sha256  = neff_sha256.c_str();
    table.neff_memory  = neff_memory.empty() ? nullptr : neff_memory.data();
    if (lnc == 0) {
        nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "lnc is 0; expected 1 or more physical cores");
    }
    for (uint32_t kernel = 0; kernel < table.n_kernels; kernel++) {
        const uint32_t begin = key_offsets[kernel];
        const int32_t  found = nk::find_key(table, &key_words[begin], key_offsets[kernel + 1] - begin);
        if (static_cast<uint32_t>(found) != kernel) {
            nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "kernel '%s' has the same key as '%s'",
                     table.ids + id_offsets[kernel], table.ids + id_offsets[found]);
        }
    }
}

namespace nk {

void check_format(const char * what, uint64_t format) {
    if (format != NEURON_KERNELS_FORMAT) {
        fail(NEURON_KERNELS_ERROR_VERSION, "%s %" PRIu64 "; this library reads format %d", what, format,
             NEURON_KERNELS_FORMAT);
    }
}

bool is_kernel_id(std::string_view text) {
    constexpr size_t MAX_ID = 63;

    return !text.empty() && text.size() <= MAX_ID && !has_control(text);
}

std::string_view check_text(const char * what, std::string_view text) {
    if (has_control(text)) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "'%s' holds a NUL or another control character", what);
    }
    return text;
}

bool is_sha256(std::string_view text) {
    return text.size() == SHA256_DIGITS && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

int32_t find_key(const neuron_kernels_table & table, const uint64_t * words, size_t n_words) {
    const uint64_t mask = table.n_slots - 1;
    uint64_t       slot = hash_words(words, n_words) & mask;
    while (const uint32_t entry = table.slots[slot]) {
        const uint32_t begin = table.key_offsets[entry - 1];
        if (table.key_offsets[entry] - begin == n_words &&
            memcmp(table.key_words + begin, words, n_words * sizeof(words[0])) == 0) {
            return static_cast<int32_t>(entry - 1);
        }
        slot = (slot + 1) & mask;
    }
    return NEURON_KERNELS_NOT_FOUND;
}

}  // namespace nk

namespace {

//
// the boundary of the C API
//

// Makes a bundle, lets `fill` open it, and turns an exception of `fill` into a status and a message, which starts with
// `what`.
template <typename F>
neuron_kernels_status open_bundle(const char *      what,
                                  const void *      source,
                                  neuron_kernels ** bundle,
                                  char *            message,
                                  size_t            message_size,
                                  F                 fill) noexcept {
    const auto report = [&](neuron_kernels_status status, const char * text) {
        if (message && message_size > 0) {
            snprintf(message, message_size, "%s%s%s", what, *text ? ": " : "", text);
        }
        return status;
    };
    if (bundle) {
        *bundle = nullptr;
    }
    if (!bundle || !source) {
        return report(NEURON_KERNELS_ERROR_ARGUMENT, "NULL where neuron_kernels_open needs a pointer");
    }
    try {
        auto opened = std::make_unique<neuron_kernels>();
        fill(*opened);
        opened->verified.reset(new std::atomic<int64_t>[opened->table.n_neffs]());
        *bundle = opened.release();
        if (message && message_size > 0) {
            *message = '\0';
        }
        return NEURON_KERNELS_OK;
    } catch (const nk::error & error) {
        return report(error.status, error.message.c_str());
    } catch (const std::exception &) {  // bad_alloc: sizes are compared with the file's before any allocation
        return report(NEURON_KERNELS_ERROR_MEMORY, "out of memory");
    }
}

bool has(const neuron_kernels * bundle, int32_t kernel) {
    return bundle && kernel >= 0 && static_cast<uint32_t>(kernel) < bundle->table.n_kernels;
}

}  // namespace

neuron_kernels_status neuron_kernels_open_file(const char *      path,
                                               neuron_kernels ** bundle,
                                               char *            message,
                                               size_t            message_size) {
    return open_bundle(path ? path : "path", path, bundle, message, message_size, [&](neuron_kernels & opened) {
        opened.file = nk::mapping(path);
        nk::read_pack(opened.file.data(), opened.file.size(), opened);
    });
}

neuron_kernels_status neuron_kernels_open_memory(const void *      data,
                                                 size_t            size,
                                                 neuron_kernels ** bundle,
                                                 char *            message,
                                                 size_t            message_size) {
    return open_bundle("pack in memory", data, bundle, message, message_size, [&](neuron_kernels & opened) {
        nk::read_pack(static_cast<const uint8_t *>(data), size, opened);
    });
}

neuron_kernels_status neuron_kernels_open_embedded(const neuron_kernels_table * table,
                                                   neuron_kernels **            bundle,
                                                   char *                       message,
                                                   size_t                       message_size) {
    return open_bundle("embedded bundle", table, bundle, message, message_size, [&](neuron_kernels & opened) {
        if (table->struct_size < sizeof(*table)) {
            nk::fail(NEURON_KERNELS_ERROR_VERSION, "its table has %" PRIu32 " bytes; this library reads %zu or more",
                     table->struct_size, sizeof(*table));
        }
        nk::check_format("it has format", table->format);
        opened.table = *table;
    });
}

void neuron_kernels_close(neuron_kernels * bundle) {
    delete bundle;
}

uint32_t neuron_kernels_api_version(void) {
    return NEURON_KERNELS_API_VERSION;
}

const char * neuron_kernels_status_name(neuron_kernels_status status) {
    switch (status) {
        case NEURON_KERNELS_OK:
            return "ok";
        case NEURON_KERNELS_ERROR_ARGUMENT:
            return "argument";
        case NEURON_KERNELS_ERROR_IO:
            return "io";
        case NEURON_KERNELS_ERROR_NOT_A_PACK:
            return "not a pack";
        case NEURON_KERNELS_ERROR_VERSION:
            return "version";
        case NEURON_KERNELS_ERROR_CORRUPT:
            return "corrupt";
        case NEURON_KERNELS_ERROR_MEMORY:
            return "memory";
    }
    return "unknown";
}

//
// find
//

int32_t neuron_kernels_find(const neuron_kernels *        bundle,
                            const char *                  op,
                            const int32_t *               op_params,
                            const neuron_kernels_tensor * inputs,
                            size_t                        n_inputs,
                            const neuron_kernels_tensor * output,
                            int32_t                       alias) {
    if (!bundle || !op || !output || (!inputs && n_inputs > 0)) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    nk::key key;
    if (!nk::make_key(op, op_params, inputs, n_inputs, *output, alias, key)) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    return nk::find_key(bundle->table, key.words, key.n_words);
}

int32_t neuron_kernels_find_words(const neuron_kernels * bundle, const uint64_t * words, size_t n_words) {
    if (!bundle || !words) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    return nk::find_key(bundle->table, words, n_words);
}

int32_t neuron_kernels_find_name(const neuron_kernels * bundle, const char * name) {
    if (!bundle || !name) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    uint64_t words[nk::SOURCE_WORDS];
    nk::make_source_key(name, words);
    return nk::find_key(bundle->table, words, nk::SOURCE_WORDS);
}

int32_t neuron_kernels_find_id(const neuron_kernels * bundle, const char * id) {
    if (!bundle || !id) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    const neuron_kernels_table & table = bundle->table;
    const uint32_t *             end   = table.id_offsets + table.n_kernels;
    const uint32_t * found = std::lower_bound(table.id_offsets, end, id, [&](uint32_t offset, const char * wanted) {
        return strcmp(table.ids + offset, wanted) < 0;
    });
    if (found == end || strcmp(table.ids + *found, id) != 0) {
        return NEURON_KERNELS_NOT_FOUND;
    }
    return static_cast<int32_t>(found - table.id_offsets);
}

int neuron_kernels_set_dense(neuron_kernels_tensor * tensor) {
    const nk::type_traits * type = tensor ? nk::find_type(tensor->type) : nullptr;
    if (!type) {
        return -1;
    }
    uint64_t nb[4] = { type->size, 0, 0, 0 };
    for (int i = 0; i < 4; i++) {
        if (tensor->ne[i] <= 0 || (i == 0 && tensor->ne[i] % type->block != 0)) {
            return -1;
        }
        const uint64_t n = static_cast<uint64_t>(tensor->ne[i]) / (i == 0 ? type->block : 1);
        uint64_t       next;
        if (__builtin_mul_overflow(nb[i], n, &next) || next > INT64_MAX) {
            return -1;
        }
        if (i < 3) {
            nb[i + 1] = next;
        }
    }
    memcpy(tensor->nb, nb, sizeof(nb));
    return 0;
}

//
// contents of a bundle
//

size_t neuron_kernels_count(const neuron_kernels * bundle) {
    return bundle ? bundle->table.n_kernels : 0;
}

const char * neuron_kernels_id(const neuron_kernels * bundle, int32_t kernel) {
    return has(bundle, kernel) ? bundle->table.ids + bundle->table.id_offsets[kernel] : nullptr;
}

const void * neuron_kernels_neff(const neuron_kernels * bundle, int32_t kernel, size_t * size) {
    if (size) {
        *size = 0;
    }
    if (!has(bundle, kernel)) {
        return nullptr;
    }
    const neuron_kernels_table & table = bundle->table;
    const uint32_t               neff  = table.kernel_neff[kernel];
    if (size) {
        *size = static_cast<size_t>(table.neff_sizes[neff]);
    }
    return table.neff_data + table.neff_offsets[neff];
}

// `again`: hashes the NEFF even if the file has not changed since its hash was right.
static neuron_kernels_status read_neff(const neuron_kernels * bundle,
                                       int32_t                kernel,
                                       void *                 data,
                                       size_t                 size,
                                       bool                   again,
                                       char *                 message,
                                       size_t                 message_size) {
    const auto report = [&](neuron_kernels_status status, const char * text) {
        if (message && message_size > 0) {
            snprintf(message, message_size, "%s", text);
        }
        return status;
    };
    char         text[NEURON_KERNELS_MESSAGE_SIZE];
    size_t       expected;
    const auto * neff = static_cast<const uint8_t *>(neuron_kernels_neff(bundle, kernel, &expected));
    if (!neff) {
        snprintf(text, sizeof(text), "there is no kernel %" PRId32, kernel);
        return report(NEURON_KERNELS_ERROR_ARGUMENT, text);
    }
    if (!data || size != expected) {
        snprintf(text, sizeof(text), "room for %zu bytes; the NEFF has %zu", data ? size : 0, expected);
        return report(NEURON_KERNELS_ERROR_ARGUMENT, text);
    }
    const int64_t state = bundle->file.state();
    if (bundle->file.data()) {
        try {
            bundle->file.read(static_cast<size_t>(neff - bundle->file.data()), data, size);
        } catch (const nk::error & error) {
            return report(error.status, error.message.c_str());
        }
    } else {
        memcpy(data, neff, size);
    }
    const neuron_kernels_table & table    = bundle->table;
    const uint32_t               number   = table.kernel_neff[kernel];
    std::atomic<int64_t> &       verified = bundle->verified[number];
    if (!again && verified && verified == state && bundle->file.state() == state) {
        return report(NEURON_KERNELS_OK, "");
    }
    const char * recorded = table.neff_sha256 + size_t{ number } * (nk::SHA256_DIGITS + 1);
    char         found[nk::SHA256_DIGITS + 1];
    nk::sha256(static_cast<const uint8_t *>(data), size, found);
    if (strcmp(found, recorded) == 0) {
        verified = state;
        return report(NEURON_KERNELS_OK, "");
    }
    snprintf(text, sizeof(text),
             "its NEFF is damaged: the SHA-256 of its %zu bytes is %s, and the bundle's index says %s; build the "
             "bundle again",
             size, found, recorded);
    return report(NEURON_KERNELS_ERROR_CORRUPT, text);
}

neuron_kernels_status neuron_kernels_read(const neuron_kernels * bundle,
                                          int32_t                kernel,
                                          void *                 data,
                                          size_t                 size,
                                          char *                 message,
                                          size_t                 message_size) {
    return read_neff(bundle, kernel, data, size, false, message, message_size);
}

neuron_kernels_status neuron_kernels_verify(const neuron_kernels * bundle,
                                            int32_t                kernel,
                                            char *                 message,
                                            size_t                 message_size) {
    size_t size;
    neuron_kernels_neff(bundle, kernel, &size);
    try {
        std::vector<uint8_t> copy(std::max(size, size_t{ 1 }));
        return read_neff(bundle, kernel, copy.data(), size, true, message, message_size);
    } catch (const std::exception &) {  // bad_alloc
        if (message && message_size > 0) {
            snprintf(message, message_size, "out of memory");
        }
        return NEURON_KERNELS_ERROR_MEMORY;
    }
}

int32_t neuron_kernels_neff_index(const neuron_kernels * bundle, int32_t kernel) {
    return has(bundle, kernel) ? static_cast<int32_t>(bundle->table.kernel_neff[kernel]) : NEURON_KERNELS_NOT_FOUND;
}

const uint64_t * neuron_kernels_neff_memory(const neuron_kernels * bundle, int32_t kernel) {
    if (!has(bundle, kernel) || !bundle->table.neff_memory) {
        return nullptr;
    }
    return bundle->table.neff_memory + size_t(NEURON_KERNELS_N_MEMORY) * bundle->table.kernel_neff[kernel];
}

size_t neuron_kernels_neff_count(const neuron_kernels * bundle) {
    return bundle ? bundle->table.n_neffs : 0;
}

const uint64_t * neuron_kernels_key(const neuron_kernels * bundle, int32_t kernel, size_t * n_words) {
    if (n_words) {
        *n_words = 0;
    }
    if (!has(bundle, kernel)) {
        return nullptr;
    }
    const neuron_kernels_table & table = bundle->table;
    const uint32_t               begin = table.key_offsets[kernel];
    if (n_words) {
        *n_words = table.key_offsets[kernel + 1] - begin;
    }
    return table.key_words + begin;
}

const char * neuron_kernels_hlo_sha256(const neuron_kernels * bundle, int32_t kernel) {
    return has(bundle, kernel) ? bundle->table.hlo_sha256 + static_cast<size_t>(kernel) * (nk::SHA256_DIGITS + 1)
                               : nullptr;
}

int neuron_kernels_simulated(const neuron_kernels * bundle) {
    return bundle && bundle->table.simulated;
}

uint32_t neuron_kernels_lnc(const neuron_kernels * bundle) {
    return bundle ? bundle->table.lnc : 0;
}

const char * neuron_kernels_metadata(const neuron_kernels * bundle, const char * name) {
    if (!bundle || !name) {
        return nullptr;
    }
    const neuron_kernels_table & table = bundle->table;

    const struct {
        const char * name;
        const char * text;
    } texts[] = {
        { "name",        table.name        },
        { "target",      table.target      },
        { "compiler",    table.compiler    },
        { "flags",       table.flags       },
        { "version",     table.version     },
        { "jax_version", table.jax_version },
    };

    for (const auto & text : texts) {
        if (strcmp(text.name, name) == 0) {
            return text.text;
        }
    }
    return nullptr;
}
