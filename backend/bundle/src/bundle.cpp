// The C API: opening bundles, checking the index of a pack, and looking kernels up in it.

#include "error.h"
#include "gguf.h"
#include "hash.h"
#include "key.h"
#include "neuron_kernels.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace {

constexpr const char * ARCHITECTURE = "neuron-kernels";
constexpr size_t       MAX_ID       = 63;
constexpr size_t       DIGEST       = 64;  // hexadecimal digits of a SHA-256

// A file in memory for as long as the object lives.
class mapping {
  public:
    mapping() = default;

    mapping(const mapping &)             = delete;
    mapping & operator=(const mapping &) = delete;

    ~mapping() {
        if (address) {
            munmap(address, length);
        }
    }

    // Throws nk::error with status IO, or NOT_A_PACK for an empty file, which can't be mapped.
    void map(const char * path);

    const uint8_t * data() const { return static_cast<const uint8_t *>(address); }

    size_t size() const { return length; }

  private:
    void * address = nullptr;
    size_t length  = 0;
};

}  // namespace

// An opened bundle. `table` is what every function reads; of an embedded bundle it points into the program, of a pack
// into the members below it and, for the NEFFs alone, into the file.
struct neuron_kernels {
    neuron_kernels_table table = {};

    mapping               file;
    std::string           name;
    std::string           target;
    std::string           compiler;
    std::string           flags;
    std::string           version;
    std::string           jax_version;
    std::string           ids;
    std::string           hlo_sha256;
    std::vector<uint32_t> id_offsets;
    std::vector<uint32_t> kernel_neff;
    std::vector<uint64_t> key_words;
    std::vector<uint32_t> key_offsets;
    std::vector<uint32_t> slots;
    std::vector<uint64_t> neff_offsets;
    std::vector<uint64_t> neff_sizes;
};

namespace {

//
// file
//

void mapping::map(const char * path) {
    // Without O_NONBLOCK the opening of a FIFO would wait for a writer.
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        nk::fail(NEURON_KERNELS_ERROR_IO, "can't be opened: %s", strerror(errno));
    }

    struct closer {
        int fd;

        ~closer() { close(fd); }
    } close_at_end{ fd };

    struct stat info;
    if (fstat(fd, &info) != 0) {
        nk::fail(NEURON_KERNELS_ERROR_IO, "can't be examined: %s", strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        nk::fail(NEURON_KERNELS_ERROR_IO, "%s; expected a regular file",
                 S_ISDIR(info.st_mode) ? "a directory" : "a device, pipe or socket");
    }
    if (static_cast<uintmax_t>(info.st_size) > SIZE_MAX) {
        nk::fail(NEURON_KERNELS_ERROR_IO, "larger than the address space");
    }
    if (info.st_size == 0) {
        return;
    }
    void * mapped = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) {
        nk::fail(NEURON_KERNELS_ERROR_IO, "can't be mapped into memory: %s", strerror(errno));
    }
    address = mapped;
    length  = static_cast<size_t>(info.st_size);
}

//
// checking a pack's index
//

[[noreturn]] void corrupt(const char * key, const std::string & what) {
    nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata '%s': %s", key, what.c_str());
}

void check_count(const char * key, uint64_t count, uint64_t expected) {
    if (count != expected) {
        corrupt(key, "has " + std::to_string(count) + " items; expected " + std::to_string(expected));
    }
}

std::string read_text(const nk::gguf_file & file, const char * key) {
    const std::string_view text = file.string(key);
    if (text.find('\0') != std::string_view::npos) {
        corrupt(key, "holds a NUL byte");
    }
    return std::string(text);
}

bool is_digest(std::string_view text) {
    return text.size() == DIGEST && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void read_ids(const nk::gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.kernel.ids";

    const uint64_t count = file.get(KEY, nk::GGUF_STRING, true).count;
    if (count == 0) {
        corrupt(KEY, "is empty; a pack holds at least one kernel");
    }
    if (count > INT32_MAX / 2) {
        corrupt(KEY, "has " + std::to_string(count) + " items; the most a pack can hold is " +
                         std::to_string(INT32_MAX / 2));
    }
    std::string_view previous;
    file.strings(KEY, [&](std::string_view id, uint64_t i) {
        if (id.empty() || id.size() > MAX_ID || id.find('\0') != std::string_view::npos) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + nk::quoted(id) + ", which is no kernel id");
        }
        if (i > 0 && id <= previous) {
            corrupt(KEY, "item " + std::to_string(i) + ", " + nk::quoted(id) + ", does not come after " +
                             nk::quoted(previous));
        }
        previous = id;
        if (bundle.ids.size() > UINT32_MAX) {
            corrupt(KEY, "takes more than 4 GiB");
        }
        bundle.id_offsets.push_back(static_cast<uint32_t>(bundle.ids.size()));
        bundle.ids.append(id).push_back('\0');
    });
}

void read_hlo_digests(const nk::gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.kernel.hlo_sha256";

    check_count(KEY, file.get(KEY, nk::GGUF_STRING, true).count, bundle.id_offsets.size());
    file.strings(KEY, [&](std::string_view digest, uint64_t i) {
        if (!is_digest(digest)) {
            corrupt(KEY,
                    "item " + std::to_string(i) + " is " + nk::quoted(digest) + "; expected 64 hexadecimal digits");
        }
        bundle.hlo_sha256.append(digest).push_back('\0');
    });
}

// Fills in where NEFFs are; the reader has checked that their bytes are in the file.
void read_neffs(const nk::gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY         = "kernelgen.kernel.neff";
    constexpr const char * DIGESTS_KEY = "kernelgen.neff.sha256";

    const std::vector<nk::gguf_tensor> & tensors = file.tensors;
    if (tensors.empty()) {
        nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "no tensors; a pack holds at least one NEFF");
    }
    check_count(DIGESTS_KEY, file.get(DIGESTS_KEY, nk::GGUF_STRING, true).count, tensors.size());
    file.strings(DIGESTS_KEY, [&](std::string_view digest, uint64_t i) {
        if (!is_digest(digest)) {
            corrupt(DIGESTS_KEY,
                    "item " + std::to_string(i) + " is " + nk::quoted(digest) + "; expected 64 hexadecimal digits");
        }
        const std::string name = "neff." + std::string(digest.substr(0, 32));
        if (tensors[i].name != name) {
            corrupt(DIGESTS_KEY, "item " + std::to_string(i) + " belongs to a tensor '" + name +
                                     "', and the tensor there is " + nk::quoted(tensors[i].name));
        }
    });
    for (const nk::gguf_tensor & tensor : tensors) {
        bundle.neff_offsets.push_back(static_cast<uint64_t>(tensor.data - tensors[0].data));
        bundle.neff_sizes.push_back(tensor.size);
    }

    bundle.kernel_neff = file.u32_array(KEY);
    check_count(KEY, bundle.kernel_neff.size(), bundle.id_offsets.size());
    for (size_t i = 0; i < bundle.kernel_neff.size(); i++) {
        if (bundle.kernel_neff[i] >= tensors.size()) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + std::to_string(bundle.kernel_neff[i]) + "; there are " +
                             std::to_string(tensors.size()) + " NEFFs");
        }
    }
}

// Returns what is wrong with a tensor's words in a key, or nullptr.
const char * check_key_tensor(const uint64_t * words) {
    int64_t  ne[4];
    uint64_t nb[4];
    for (int i = 0; i < 4; i++) {
        ne[i] = static_cast<int64_t>(words[1 + i]);
        nb[i] = words[5 + i];
        if (ne[i] <= 0) {
            return "a tensor has a dimension that is not positive";
        }
        if (nb[i] > INT64_MAX) {
            return "a tensor has a stride of 2^63 or more";
        }
    }
    if (words[0] > INT32_MAX) {
        return "a tensor has an impossible type";
    }
    // A type this library is too old to know is not an error: nobody can ask for it here, and the other kernels are
    // fine.
    if (const nk::type_traits * type = nk::find_type(static_cast<int64_t>(words[0]))) {
        if (!nk::canonicalize(*type, ne, nb)) {
            return "a tensor's rows are not whole blocks of its type";
        }
        if (memcmp(nb, words + 5, sizeof(nb)) != 0) {
            return "a tensor's strides are not canonical, so it could not be found";
        }
    }
    return nullptr;
}

// Returns what is wrong with a kernel's key, or nullptr.
const char * check_key(const uint64_t * words, size_t n_words) {
    constexpr const char * LENGTH = "its length does not fit its inputs";

    if (n_words < 2 + nk::TENSOR_WORDS + nk::PARAM_WORDS) {
        return "it is too short";
    }
    const uint64_t n_inputs = words[1] & 0xFFFFFFFF;
    const uint64_t alias    = words[1] >> 32;  // + 1
    size_t         left     = n_words - 2 - nk::TENSOR_WORDS - nk::PARAM_WORDS;
    bool           absent   = false;
    words += 2;
    for (uint64_t i = 0; i < n_inputs; i++) {
        if (left == 0) {
            return LENGTH;
        }
        absent             = words[0] == nk::ABSENT_WORD;
        const size_t width = absent ? 1 : nk::TENSOR_WORDS;
        if (left < width) {
            return LENGTH;
        }
        if (absent) {
            if (alias == i + 1) {
                return "the result shares the memory of an input that is absent";
            }
        } else if (const char * problem = check_key_tensor(words)) {
            return problem;
        }
        words += width;
        left -= width;
    }
    if (left != 0) {
        return LENGTH;
    }
    if (absent) {
        return "its last input is absent";
    }
    if (alias > n_inputs) {
        return "the result shares the memory of an input that it does not have";
    }
    return check_key_tensor(words);  // the result
}

void read_keys(const nk::gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.key.offsets";

    const size_t n     = bundle.id_offsets.size();
    bundle.key_words   = file.u64_array("kernelgen.key.words");
    bundle.key_offsets = file.u32_array(KEY);

    const std::vector<uint32_t> & offsets = bundle.key_offsets;
    check_count(KEY, offsets.size(), n + 1);
    if (offsets.front() != 0 || offsets.back() != bundle.key_words.size()) {
        corrupt(KEY, "goes from " + std::to_string(offsets.front()) + " to " + std::to_string(offsets.back()) +
                         "; expected 0 to " + std::to_string(bundle.key_words.size()) +
                         ", the items of 'kernelgen.key.words'");
    }
    // All of them before any key: ascending offsets that end at the last word are in range.
    for (size_t i = 0; i < n; i++) {
        if (offsets[i] >= offsets[i + 1]) {
            corrupt(KEY, "item " + std::to_string(i + 1) + " is " + std::to_string(offsets[i + 1]) +
                             "; expected more than " + std::to_string(offsets[i]));
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (const char * problem = check_key(&bundle.key_words[offsets[i]], offsets[i + 1] - offsets[i])) {
            corrupt("kernelgen.key.words", "key of kernel " + nk::quoted(&bundle.ids[bundle.id_offsets[i]]) +
                                               ", from item " + std::to_string(offsets[i]) + ": " + problem);
        }
    }
}

bool same_words(const neuron_kernels_table & table, uint32_t kernel, const uint64_t * words, size_t n_words) {
    const uint32_t begin = table.key_offsets[kernel];
    return table.key_offsets[kernel + 1] - begin == n_words &&
           memcmp(table.key_words + begin, words, n_words * sizeof(words[0])) == 0;
}

// Reads the hash table and looks every kernel up in it, so that a search finds each, ends, and never leaves the arrays.
void read_slots(const nk::gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.key.slots";

    const uint64_t n = bundle.id_offsets.size();
    bundle.slots     = file.u32_array(KEY);

    const std::vector<uint32_t> & slots = bundle.slots;
    if (slots.size() < std::max<uint64_t>(nk::MIN_SLOTS, 2 * n) || slots.size() > UINT32_MAX ||
        (slots.size() & (slots.size() - 1)) != 0) {
        corrupt(KEY, "has " + std::to_string(slots.size()) + " items; expected a power of two, at least " +
                         std::to_string(std::max<uint64_t>(nk::MIN_SLOTS, 2 * n)));
    }
    uint64_t taken = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i] > n) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + std::to_string(slots[i]) + "; there are " +
                             std::to_string(n) + " kernels");
        }
        taken += slots[i] != 0;
    }
    if (taken != n) {
        corrupt(KEY, "holds " + std::to_string(taken) + " kernels; expected " + std::to_string(n));
    }

    // Chains in a table that is at most half full have one or two steps. Without a limit a file made for it could keep
    // this loop busy for hours.
    uint64_t steps_left = 64 * n + 4096;

    const neuron_kernels_table & table = bundle.table;
    const size_t                 mask  = slots.size() - 1;
    for (uint32_t kernel = 0; kernel < n; kernel++) {
        const uint64_t * words   = table.key_words + table.key_offsets[kernel];
        const size_t     n_words = table.key_offsets[kernel + 1] - table.key_offsets[kernel];
        for (size_t slot = nk::hash_words(words, n_words) & mask; slots[slot] != kernel + 1; slot = (slot + 1) & mask) {
            const char * id = table.ids + table.id_offsets[kernel];
            if (slots[slot] == 0) {
                corrupt(KEY, "kernel " + nk::quoted(id) + " is not where its key's hash leads");
            }
            if (same_words(table, slots[slot] - 1, words, n_words)) {
                corrupt("kernelgen.key.words", "kernel " + nk::quoted(id) + " has the same key as " +
                                                   nk::quoted(table.ids + table.id_offsets[slots[slot] - 1]));
            }
            if (--steps_left == 0) {
                corrupt(KEY, "its chains are longer than in any table that kernelgen writes");
            }
        }
    }
}

// Opens a pack whose bytes outlive the bundle.
void read_pack(const uint8_t * data, size_t size, neuron_kernels & bundle) {
    const nk::gguf_file file = nk::gguf_read(data, size);

    const nk::gguf_value * architecture = file.find("general.architecture");
    if (!architecture) {
        nk::fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "a GGUF file without 'general.architecture'; expected '%s'",
                 ARCHITECTURE);
    }
    if (const std::string_view text = file.string("general.architecture"); text != ARCHITECTURE) {
        nk::fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "a GGUF file of architecture %s; expected '%s'",
                 nk::quoted(text).c_str(), ARCHITECTURE);
    }
    if (const uint32_t format = file.u32("kernelgen.format"); format != NEURON_KERNELS_FORMAT) {
        nk::fail(NEURON_KERNELS_ERROR_VERSION, "a kernel pack of format %" PRIu32 "; this library reads format %d",
                 format, NEURON_KERNELS_FORMAT);
    }

    bundle.name        = read_text(file, "kernelgen.name");
    bundle.target      = read_text(file, "kernelgen.target");
    bundle.compiler    = read_text(file, "kernelgen.compiler");
    bundle.version     = read_text(file, "kernelgen.version");
    bundle.jax_version = read_text(file, "kernelgen.jax_version");
    file.strings("kernelgen.flags", [&](std::string_view flag, uint64_t) {
        if (flag.find('\0') != std::string_view::npos) {
            corrupt("kernelgen.flags", "holds a NUL byte");
        }
        bundle.flags.append(flag).push_back('\n');
    });

    read_ids(file, bundle);
    read_hlo_digests(file, bundle);
    read_neffs(file, bundle);
    read_keys(file, bundle);

    neuron_kernels_table & table = bundle.table;
    table.struct_size            = sizeof(table);
    table.format                 = NEURON_KERNELS_FORMAT;
    table.simulated              = file.boolean("kernelgen.simulated");
    table.lnc                    = file.u32("kernelgen.lnc");
    table.n_kernels              = static_cast<uint32_t>(bundle.id_offsets.size());
    table.n_neffs                = static_cast<uint32_t>(bundle.neff_sizes.size());
    table.name                   = bundle.name.c_str();
    table.target                 = bundle.target.c_str();
    table.compiler               = bundle.compiler.c_str();
    table.flags                  = bundle.flags.c_str();
    table.version                = bundle.version.c_str();
    table.jax_version            = bundle.jax_version.c_str();
    table.ids                    = bundle.ids.c_str();
    table.id_offsets             = bundle.id_offsets.data();
    table.hlo_sha256             = bundle.hlo_sha256.c_str();
    table.kernel_neff            = bundle.kernel_neff.data();
    table.key_words              = bundle.key_words.data();
    table.key_offsets            = bundle.key_offsets.data();
    table.neff_data              = file.tensors[0].data;
    table.neff_offsets           = bundle.neff_offsets.data();
    table.neff_sizes             = bundle.neff_sizes.data();
    read_slots(file, bundle);
    table.slots   = bundle.slots.data();
    table.n_slots = static_cast<uint32_t>(bundle.slots.size());
}

//
// the edge of the C API
//

// Makes a bundle, lets `fill` open it, and turns what that throws into a status and a message that starts with `what`.
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
        *bundle = opened.release();
        if (message && message_size > 0) {
            *message = '\0';
        }
        return NEURON_KERNELS_OK;
    } catch (const nk::error & error) {
        return report(error.status, error.message.c_str());
    } catch (const std::exception &) {  // bad_alloc: sizes were compared with the file's before anything was allocated
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
        opened.file.map(path);
        read_pack(opened.file.data(), opened.file.size(), opened);
    });
}

neuron_kernels_status neuron_kernels_open_memory(const void *      data,
                                                 size_t            size,
                                                 neuron_kernels ** bundle,
                                                 char *            message,
                                                 size_t            message_size) {
    return open_bundle("pack in memory", data, bundle, message, message_size,
                       [&](neuron_kernels & opened) { read_pack(static_cast<const uint8_t *>(data), size, opened); });
}

neuron_kernels_status neuron_kernels_open_embedded(const neuron_kernels_table * table,
                                                   neuron_kernels **            bundle,
                                                   char *                       message,
                                                   size_t                       message_size) {
    return open_bundle("embedded bundle", table, bundle, message, message_size, [&](neuron_kernels & opened) {
        if (table->struct_size < sizeof(neuron_kernels_table)) {
            nk::fail(NEURON_KERNELS_ERROR_VERSION, "its table has %" PRIu32 " bytes; this library reads %zu or more",
                     table->struct_size, sizeof(neuron_kernels_table));
        }
        if (table->format != NEURON_KERNELS_FORMAT) {
            nk::fail(NEURON_KERNELS_ERROR_VERSION, "it has format %" PRIu32 "; this library reads format %d",
                     table->format, NEURON_KERNELS_FORMAT);
        }
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
    const neuron_kernels_table & table = bundle->table;
    const uint64_t               mask  = table.n_slots - 1;
    uint64_t                     slot  = nk::hash_words(key.words, key.n_words) & mask;
    while (const uint32_t entry = table.slots[slot]) {
        if (same_words(table, entry - 1, key.words, key.n_words)) {
            return static_cast<int32_t>(entry - 1);
        }
        slot = (slot + 1) & mask;
    }
    return NEURON_KERNELS_NOT_FOUND;
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
// what a bundle holds
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

int32_t neuron_kernels_neff_index(const neuron_kernels * bundle, int32_t kernel) {
    return has(bundle, kernel) ? static_cast<int32_t>(bundle->table.kernel_neff[kernel]) : NEURON_KERNELS_NOT_FOUND;
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
    return has(bundle, kernel) ? bundle->table.hlo_sha256 + static_cast<size_t>(kernel) * (DIGEST + 1) : nullptr;
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
