// Packs: the reader copies and checks the index; the NEFFs stay in the file.

#include "bundle.h"
#include "error.h"
#include "gguf.h"
#include "key.h"

namespace nk {

namespace {

constexpr const char * ARCHITECTURE = "neuron-kernels";

[[noreturn]] void corrupt(const char * key, const std::string & what) {
    fail(NEURON_KERNELS_ERROR_CORRUPT, "metadata '%s': %s", key, what.c_str());
}

void check_count(const char * key, uint64_t count, uint64_t expected) {
    if (count != expected) {
        corrupt(key, "has " + std::to_string(count) + " items; expected " + std::to_string(expected));
    }
}

std::string read_text(const gguf_file & file, const char * key) {
    return std::string(check_text(key, file.string(key)));
}

void read_ids(const gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.kernel.ids";

    const uint64_t count = file.get(KEY, GGUF_STRING, true).count;
    if (count == 0) {
        corrupt(KEY, "is empty; a pack holds at least one kernel");
    }
    if (count > INT32_MAX / 2) {
        corrupt(KEY, "has " + std::to_string(count) + " items; the most a pack can hold is " +
                         std::to_string(INT32_MAX / 2));
    }
    std::string_view previous;
    file.strings(KEY, [&](std::string_view id, uint64_t i) {
        if (!is_kernel_id(id)) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + quoted(id) + ", which is not a kernel id");
        }
        if (i > 0 && id <= previous) {
            corrupt(KEY, "item " + std::to_string(i) + ", " + quoted(id) + ", does not come after " + quoted(previous));
        }
        previous = id;
        if (bundle.ids.size() > UINT32_MAX) {
            corrupt(KEY, "takes more than 4 GiB");
        }
        bundle.id_offsets.push_back(static_cast<uint32_t>(bundle.ids.size()));
        bundle.ids.append(id).push_back('\0');
    });
}

void read_hlo_digests(const gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.kernel.hlo_sha256";

    check_count(KEY, file.get(KEY, GGUF_STRING, true).count, bundle.id_offsets.size());
    file.strings(KEY, [&](std::string_view digest, uint64_t i) {
        if (!is_sha256(digest)) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + quoted(digest) + "; expected 64 hexadecimal digits");
        }
        bundle.hlo_sha256.append(digest).push_back('\0');
    });
}

// Fills in the places of NEFFs; the reader has checked that their bytes are in the file.
void read_neffs(const gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY         = "kernelgen.kernel.neff";
    constexpr const char * DIGESTS_KEY = "kernelgen.neff.sha256";

    const std::vector<gguf_tensor> & tensors = file.tensors;
    if (tensors.empty()) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "no tensors; a pack holds at least one NEFF");
    }
    check_count(DIGESTS_KEY, file.get(DIGESTS_KEY, GGUF_STRING, true).count, tensors.size());
    file.strings(DIGESTS_KEY, [&](std::string_view digest, uint64_t i) {
        if (!is_sha256(digest)) {
            corrupt(DIGESTS_KEY,
                    "item " + std::to_string(i) + " is " + quoted(digest) + "; expected 64 hexadecimal digits");
        }
        const std::string name = "neff." + std::string(digest.substr(0, 32));
        if (tensors[i].name != name) {
            corrupt(DIGESTS_KEY, "item " + std::to_string(i) + " belongs to a tensor '" + name +
                                     "', and the tensor there is " + quoted(tensors[i].name));
        }
        bundle.neff_sha256.append(digest).push_back('\0');
    });
    for (const gguf_tensor & tensor : tensors) {
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

// Reads the core memory that programs take; older packs do not state it.
void read_memory(const gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.neff.memory";

    if (!file.find(KEY)) {
        return;
    }
    bundle.neff_memory = file.u64_array(KEY);
    check_count(KEY, bundle.neff_memory.size(), NEURON_KERNELS_N_MEMORY * bundle.neff_sizes.size());
    for (size_t i = 0; i < bundle.neff_memory.size(); i++) {
        if (bundle.neff_memory[i] > NEURON_KERNELS_MAX_MEMORY) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + std::to_string(bundle.neff_memory[i]) +
                             " bytes; expected at most " + std::to_string(NEURON_KERNELS_MAX_MEMORY));
        }
    }
}

void read_keys(const gguf_file & file, neuron_kernels & bundle) {
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
    // Check all offsets before any key: ascending offsets that end at the last word are in range.
    for (size_t i = 0; i < n; i++) {
        if (offsets[i] >= offsets[i + 1]) {
            corrupt(KEY, "item " + std::to_string(i + 1) + " is " + std::to_string(offsets[i + 1]) +
                             "; expected more than " + std::to_string(offsets[i]));
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (const char * problem = check_key(&bundle.key_words[offsets[i]], offsets[i + 1] - offsets[i])) {
            corrupt("kernelgen.key.words", "key of kernel " + quoted(&bundle.ids[bundle.id_offsets[i]]) +
                                               ", from item " + std::to_string(offsets[i]) + ": " + problem);
        }
    }
}

// Reads the hash table, which must equal the table computed from the keys.
void read_slots(const gguf_file & file, neuron_kernels & bundle) {
    constexpr const char * KEY = "kernelgen.key.slots";

    bundle.slots                         = file.u32_array(KEY);
    const std::vector<uint32_t> expected = make_slots(bundle.key_words, bundle.key_offsets);
    check_count(KEY, bundle.slots.size(), expected.size());
    for (size_t i = 0; i < expected.size(); i++) {
        if (bundle.slots[i] != expected[i]) {
            corrupt(KEY, "item " + std::to_string(i) + " is " + std::to_string(bundle.slots[i]) + "; expected " +
                             std::to_string(expected[i]) + ", as the keys have it");
        }
    }
}

}  // namespace

void read_pack(const uint8_t * data, size_t size, neuron_kernels & bundle) {
    const gguf_file file = gguf_read(data, size);

    const gguf_value * architecture = file.find("general.architecture");
    if (!architecture) {
        fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "a GGUF file without 'general.architecture'; expected '%s'",
             ARCHITECTURE);
    }
    if (const std::string_view text = file.string("general.architecture"); text != ARCHITECTURE) {
        fail(NEURON_KERNELS_ERROR_NOT_A_PACK, "a GGUF file of architecture %s; expected '%s'", quoted(text).c_str(),
             ARCHITECTURE);
    }
    check_format("a kernel pack of format", file.u32("kernelgen.format"));
    if (const uint32_t alignment = file.u32("general.alignment"); alignment != ALIGNMENT) {
        corrupt("general.alignment", "is " + std::to_string(alignment) + "; expected " + std::to_string(ALIGNMENT));
    }

    bundle.name        = read_text(file, "kernelgen.name");
    bundle.target      = read_text(file, "kernelgen.target");
    bundle.compiler    = read_text(file, "kernelgen.compiler");
    bundle.version     = read_text(file, "kernelgen.version");
    bundle.jax_version = read_text(file, "kernelgen.jax_version");
    file.strings("kernelgen.flags", [&](std::string_view flag, uint64_t) {
        bundle.flags.append(check_text("kernelgen.flags", flag)).push_back('\n');
    });

    read_ids(file, bundle);
    read_hlo_digests(file, bundle);
    read_neffs(file, bundle);
    read_memory(file, bundle);
    read_keys(file, bundle);
    read_slots(file, bundle);

    bundle.make_table(file.boolean("kernelgen.simulated"), file.u32("kernelgen.lnc"), file.tensors[0].data);
}

}  // namespace nk
