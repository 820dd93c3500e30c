// Trees: the index is JSON, and NEFFs are separate files that are read into memory.

#include "bundle.h"
#include "error.h"
#include "json.h"
#include "key.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <map>

namespace nk {

namespace {

constexpr size_t DIGITS_PER_WORD = 16;

[[noreturn]] void corrupt(const json & kernel, const std::string & what) {
    fail(NEURON_KERNELS_ERROR_CORRUPT, "kernel %s at byte %zu: %s", quoted(kernel.string("id")).c_str(), kernel.at,
         what.c_str());
}

std::vector<uint64_t> read_key(const json & kernel) {
    const std::string &   digits = kernel.string("key");
    std::vector<uint64_t> words(digits.size() / DIGITS_PER_WORD);
    if (digits.size() % DIGITS_PER_WORD != 0 || !is_hexadecimal(digits)) {
        corrupt(kernel, "its key is not a sequence of words of 16 hexadecimal digits");
    }
    for (size_t i = 0; i < words.size(); i++) {
        const char * const first = digits.data() + i * DIGITS_PER_WORD;
        std::from_chars(first, first + DIGITS_PER_WORD, words[i], 16);
    }
    if (const char * problem = check_key(words.data(), words.size())) {
        corrupt(kernel, std::string("its key: ") + problem);
    }
    return words;
}

const std::string & read_sha256(const json & kernel, const char * name) {
    const std::string & digest = kernel.string(name);
    if (!is_sha256(digest)) {
        corrupt(kernel, std::string("'") + name + "' is " + quoted(digest) + "; expected 64 hexadecimal digits");
    }
    return digest;
}

// Returns the path of a kernel's NEFF, which must be inside the tree even if it is a link.
const std::string & read_path(const std::string & folder, const std::string & root, const json & kernel) {
    const std::string & path = kernel.string("neff");
    if (path.empty() || path[0] == '/' || ("/" + path + "/").find("/../") != std::string::npos) {
        corrupt(kernel, "'neff' is " + quoted(path) + ", which leads out of the tree");
    }
    const std::string real = real_path(folder + "/" + path);  // "" for a missing file, which can't be opened
    if (!real.empty() && real.compare(0, root.size(), root) != 0) {
        corrupt(kernel, "'neff' is " + quoted(path) + ", a link that leads out of the tree");
    }
    return path;
}

void read_neff(const std::string & folder, const std::string & path, const json & kernel, neuron_kernels & bundle) {
    mapping file;
    try {
        file = mapping((folder + "/" + path).c_str());
    } catch (const error & e) {
        fail(e.status, "%s: %s", path.c_str(), e.message.c_str());
    }
    const uint64_t size = kernel.count("neff_size", UINT64_MAX);
    if (file.size() != size || size == 0) {
        corrupt(kernel, "its NEFF " + quoted(path) + " has " + std::to_string(file.size()) +
                            " bytes, and 'neff_size' is " + std::to_string(size));
    }
    std::vector<uint8_t> & data = bundle.neff_data;
    data.resize((data.size() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    bundle.neff_offsets.push_back(data.size());
    bundle.neff_sizes.push_back(size);
    data.insert(data.end(), file.data(), file.data() + file.size());
}

// Reads the core memory that the program of NEFF number `neff` takes. A tree states it for all NEFFs or for none.
void read_memory(const json & kernel, uint32_t neff, bool fresh, neuron_kernels & bundle) {
    std::vector<uint64_t> & all = bundle.neff_memory;
    std::vector<uint64_t>   said;
    for (const auto & [name, value] : kernel.members) {
        if (name == "neff_memory") {
            for (const char * figure : { "code", "rings", "scratchpad" }) {
                said.push_back(value.count(figure, NEURON_KERNELS_MAX_MEMORY));
            }
        }
    }
    if (!bundle.kernel_neff.empty() && all.empty() != said.empty()) {
        corrupt(kernel, "some kernels have 'neff_memory', and some don't");
    }
    if (fresh) {
        all.insert(all.end(), said.begin(), said.end());
    } else if (!std::equal(said.begin(), said.end(), all.data() + (all.empty() ? 0 : neff * NEURON_KERNELS_N_MEMORY))) {
        corrupt(kernel, "'neff_memory' differs from that of other kernels with this 'neff_sha256'");
    }
}

// Returns the kernels in the order of their ids; an edited file may have another order.
std::vector<const json *> sorted_kernels(const json & index) {
    std::vector<const json *> kernels;
    for (const json & kernel : index.get("kernels", json::ARRAY).items) {
        if (!is_kernel_id(kernel.string("id"))) {
            corrupt(kernel, quoted(kernel.string("id")) + " is not a kernel id");
        }
        kernels.push_back(&kernel);
    }
    if (kernels.empty()) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "'kernels' is empty; a tree holds at least one kernel");
    }
    const auto id_of = [](const json * kernel) -> const std::string & {
        return kernel->string("id");
    };
    std::sort(kernels.begin(), kernels.end(), [&](const json * a, const json * b) { return id_of(a) < id_of(b); });
    for (size_t i = 1; i < kernels.size(); i++) {
        if (id_of(kernels[i - 1]) == id_of(kernels[i])) {
            corrupt(*kernels[i], "its id " + quoted(id_of(kernels[i])) + " is a duplicate");
        }
    }
    return kernels;
}

void read_kernels(const std::string & folder, const json & index, neuron_kernels & bundle) {
    std::map<std::string, uint32_t> neffs;  // the numbers of NEFFs that were read, by SHA-256
    // A tree's root is the folder of its real index: in a sandbox's folder of links to a tree's files, all links lead
    // to one place.
    std::string                     root = real_path(folder + "/index.json");
    root.resize(root.rfind('/') + 1);
    bundle.key_offsets = { 0 };
    for (const json * kernel : sorted_kernels(index)) {
        bundle.id_offsets.push_back(static_cast<uint32_t>(bundle.ids.size()));
        bundle.ids.append(kernel->string("id")).push_back('\0');
        bundle.hlo_sha256.append(read_sha256(*kernel, "hlo_sha256")).push_back('\0');

        const std::vector<uint64_t> words = read_key(*kernel);
        bundle.key_words.insert(bundle.key_words.end(), words.begin(), words.end());
        bundle.key_offsets.push_back(static_cast<uint32_t>(bundle.key_words.size()));

        const std::string & digest = read_sha256(*kernel, "neff_sha256");
        const std::string & path   = read_path(folder, root, *kernel);
        const auto [neff, fresh]   = neffs.emplace(digest, static_cast<uint32_t>(neffs.size()));
        if (fresh) {
            read_neff(folder, path, *kernel, bundle);
            bundle.neff_sha256.append(digest).push_back('\0');
        } else if (const uint64_t size = bundle.neff_sizes[neff->second];
                   kernel->count("neff_size", UINT64_MAX) != size) {
            corrupt(*kernel, "'neff_size' is not " + std::to_string(size) + ", as of others with this 'neff_sha256'");
        }
        read_memory(*kernel, neff->second, fresh, bundle);
        bundle.kernel_neff.push_back(neff->second);
    }
    bundle.slots = make_slots(bundle.key_words, bundle.key_offsets);
}

}  // namespace

void read_tree(const std::string & folder, neuron_kernels & bundle) {
    const mapping file((folder + "/index.json").c_str());
    // Offsets in the bundle's arrays have 32 bits, and each array is smaller than the file.
    if (file.size() > UINT32_MAX) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "takes more than 4 GiB");
    }
    const json index = json_read(file.text());
    check_format("a tree of format", index.count("format", UINT64_MAX));
    const auto text = [&index](const char * name) {
        return std::string(check_text(name, index.string(name)));
    };
    bundle.name        = text("name");
    bundle.target      = text("target");
    bundle.compiler    = text("compiler");
    bundle.version     = text("version");
    bundle.jax_version = text("jax_version");
    for (const json & flag : index.get("flags", json::ARRAY).items) {
        if (flag.kind != json::STRING) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "the flag at byte %zu is not a string", flag.at);
        }
        bundle.flags.append(check_text("flags", flag.text)).push_back('\n');
    }
    const uint32_t lnc = static_cast<uint32_t>(index.count("lnc", UINT32_MAX));
    read_kernels(folder, index, bundle);
    bundle.make_table(index.boolean("simulated"), lnc, bundle.neff_data.data());
}

}  // namespace nk
