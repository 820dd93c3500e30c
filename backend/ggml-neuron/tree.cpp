#include "tree.h"

#include "../bundle/src/key.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

//
// JSON, as far as kernelgen writes it
//

struct json {
    enum kind_t { NONE, BOOL, NUMBER, STRING, ARRAY, OBJECT };

    kind_t                                    kind   = NONE;
    bool                                      truth  = false;
    double                                    number = 0;
    std::string                               text;
    std::vector<json>                         items;
    std::vector<std::pair<std::string, json>> members;

    // Returns a member of an object, which must be of this kind.
    const json & get(const char * name, kind_t wanted) const {
        for (const auto & member : members) {
            if (member.first == name) {
                if (member.second.kind != wanted) {
                    throw std::runtime_error(std::string("'") + name + "' is of another kind than expected");
                }
                return member.second;
            }
        }
        throw std::runtime_error(std::string("'") + name + "' is missing");
    }

    const std::string & string(const char * name) const { return get(name, STRING).text; }

    uint64_t integer(const char * name) const {
        const double value = get(name, NUMBER).number;
        if (!(value >= 0 && value < 9e15) || value != (double) (uint64_t) value) {
            throw std::runtime_error(std::string("'") + name + "' is no count");
        }
        return (uint64_t) value;
    }
};

class json_parser {
  public:
    explicit json_parser(const std::string & source) : text(source) {}

    json parse() {
        json value = read(0);
        skip();
        if (at != text.size()) {
            fail("more after the end");
        }
        return value;
    }

  private:
    static constexpr int MAX_DEPTH = 16;

    const std::string & text;
    size_t              at = 0;

    [[noreturn]] void fail(const char * what) const {
        throw std::runtime_error(std::string("no JSON: ") + what + " at byte " + std::to_string(at));
    }

    void skip() {
        while (at < text.size() && strchr(" \t\r\n", text[at])) {
            at++;
        }
    }

    char peek() {
        skip();
        return at < text.size() ? text[at] : '\0';
    }

    bool take(char c) {
        if (peek() != c) {
            return false;
        }
        at++;
        return true;
    }

    bool word(const char * w) {
        const size_t n = strlen(w);
        if (text.compare(at, n, w) != 0) {
            return false;
        }
        at += n;
        return true;
    }

    json read(int depth) {
        if (depth > MAX_DEPTH) {
            fail("nested too deep");
        }
        json value;
        switch (peek()) {
            case '{':
                value.kind = json::OBJECT;
                at++;
                while (!take('}')) {
                    if (!value.members.empty() && !take(',')) {
                        fail("',' or '}' expected");
                    }
                    std::string name = read_string();
                    if (!take(':')) {
                        fail("':' expected");
                    }
                    value.members.emplace_back(std::move(name), read(depth + 1));
                }
                return value;
            case '[':
                value.kind = json::ARRAY;
                at++;
                while (!take(']')) {
                    if (!value.items.empty() && !take(',')) {
                        fail("',' or ']' expected");
                    }
                    value.items.push_back(read(depth + 1));
                }
                return value;
            case '"':
                value.kind = json::STRING;
                value.text = read_string();
                return value;
            default:
                break;
        }
        if (word("null")) {
            return value;
        }
        if (word("true") || word("false")) {
            value.kind  = json::BOOL;
            value.truth = text[at - 2] == 'u';
            return value;
        }
        value.kind       = json::NUMBER;
        const char * end = nullptr;
        value.number     = strtod(text.c_str() + at, (char **) &end);
        if (end == text.c_str() + at) {
            fail("a value expected");
        }
        at = (size_t) (end - text.c_str());
        return value;
    }

    // kernelgen writes ASCII; of \u escapes only those of one byte occur in what is read here.
    std::string read_string() {
        if (!take('"')) {
            fail("a string expected");
        }
        std::string value;
        while (at < text.size() && text[at] != '"') {
            if (text[at] != '\\') {
                value += text[at++];
                continue;
            }
            const char c = at + 1 < text.size() ? text[at + 1] : '\0';
            at += 2;
            const char * codes = "\"\\/bfnrt";
            const char * means = "\"\\/\b\f\n\r\t";
            if (const char * found = c ? strchr(codes, c) : nullptr) {
                value += means[found - codes];
            } else if (c == 'u' && at + 4 <= text.size()) {
                const long code = strtol(text.substr(at, 4).c_str(), nullptr, 16);
                value += code < 0x80 ? (char) code : '?';
                at += 4;
            } else {
                fail("an unknown escape");
            }
        }
        if (at >= text.size()) {
            fail("a string without an end");
        }
        at++;
        return value;
    }
};

//
// the tree as a table
//

// What the table points to. Like every bundle of the backend it lives as long as the process.
struct tree {
    neuron_kernels_table  table{};
    std::string           name, target, compiler, flags, version, jax_version;
    std::string           ids;
    std::string           hlo_sha256;
    std::vector<uint32_t> id_offsets;
    std::vector<uint32_t> kernel_neff;
    std::vector<uint64_t> key_words;
    std::vector<uint32_t> key_offsets{ 0 };
    std::vector<uint32_t> slots;
    std::vector<uint8_t>  neff_data;
    std::vector<uint64_t> neff_offsets;
    std::vector<uint64_t> neff_sizes;
};

std::string read_file(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error(path + ": " + strerror(errno));
    }
    std::string data{ std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>() };
    if (file.bad()) {
        throw std::runtime_error(path + " can't be read");
    }
    return data;
}

std::vector<uint64_t> read_key(const std::string & digits) {
    if (digits.empty() || digits.size() % 16) {
        throw std::runtime_error("'key' is no sequence of words");
    }
    std::vector<uint64_t> words;
    for (size_t i = 0; i < digits.size(); i += 16) {
        const std::string word = digits.substr(i, 16);
        if (word.find_first_not_of("0123456789abcdef") != std::string::npos) {
            throw std::runtime_error("'key' is no sequence of words");
        }
        words.push_back(strtoull(word.c_str(), nullptr, 16));
    }
    return words;
}

// A path in an index stays inside its tree.
void check_path(const std::string & path) {
    if (path.empty() || path[0] == '/' || ("/" + path + "/").find("/../") != std::string::npos) {
        throw std::runtime_error("'" + path + "' leads out of the tree");
    }
}

void read_kernels(const std::string & folder, const json & index, tree & t) {
    std::vector<const json *> kernels;
    for (const json & kernel : index.get("kernels", json::ARRAY).items) {
        kernels.push_back(&kernel);
    }
    if (kernels.empty()) {
        throw std::runtime_error("it lists no kernels");
    }
    std::sort(kernels.begin(), kernels.end(),
              [](const json * a, const json * b) { return a->string("id") < b->string("id"); });

    std::map<std::string, uint32_t> neffs;  // by SHA-256
    for (const json * kernel_pointer : kernels) {
        const json &      kernel = *kernel_pointer;
        const std::string sha    = kernel.string("neff_sha256");
        const auto        found  = neffs.find(sha);
        if (found != neffs.end()) {
            t.kernel_neff.push_back(found->second);
        } else {
            const std::string path = kernel.string("neff");
            check_path(path);
            const std::string neff = read_file(folder + "/" + path);
            if (neff.size() != kernel.integer("neff_size")) {
                throw std::runtime_error(path + " has " + std::to_string(neff.size()) + " bytes and index.json says " +
                                         std::to_string(kernel.integer("neff_size")));
            }
            const uint32_t number = (uint32_t) t.neff_sizes.size();
            neffs[sha]            = number;
            t.kernel_neff.push_back(number);
            t.neff_data.resize((t.neff_data.size() + 63) / 64 * 64);
            t.neff_offsets.push_back(t.neff_data.size());
            t.neff_sizes.push_back(neff.size());
            t.neff_data.insert(t.neff_data.end(), neff.begin(), neff.end());
        }

        t.id_offsets.push_back((uint32_t) t.ids.size());
        t.ids += kernel.string("id") + '\0';
        const std::string hlo = kernel.string("hlo_sha256");
        if (hlo.size() != 64) {
            throw std::runtime_error("'hlo_sha256' has " + std::to_string(hlo.size()) + " digits");
        }
        t.hlo_sha256 += hlo + '\0';

        const std::vector<uint64_t> words = read_key(kernel.string("key"));
        t.key_words.insert(t.key_words.end(), words.begin(), words.end());
        t.key_offsets.push_back((uint32_t) t.key_words.size());
    }
    t.slots = nk::make_slots(t.key_words, t.key_offsets);
}

void read_index(const std::string & folder, tree & t) {
    const std::string text   = read_file(folder + "/index.json");
    const json        index  = json_parser(text).parse();
    const uint64_t    format = index.integer("format");
    if (format != NEURON_KERNELS_FORMAT) {
        throw std::runtime_error("it has format " + std::to_string(format) + "; this program reads format " +
                                 std::to_string(NEURON_KERNELS_FORMAT));
    }
    t.name        = index.string("name");
    t.target      = index.string("target");
    t.compiler    = index.string("compiler");
    t.version     = index.string("version");
    t.jax_version = index.string("jax_version");
    for (const json & flag : index.get("flags", json::ARRAY).items) {
        t.flags += flag.text + "\n";
    }
    read_kernels(folder, index, t);

    neuron_kernels_table & table = t.table;
    table.struct_size            = sizeof(table);
    table.format                 = NEURON_KERNELS_FORMAT;
    table.simulated              = index.get("simulated", json::BOOL).truth;
    table.lnc                    = (uint32_t) index.integer("lnc");
    table.n_kernels              = (uint32_t) t.id_offsets.size();
    table.n_neffs                = (uint32_t) t.neff_sizes.size();
    table.n_slots                = (uint32_t) t.slots.size();
    table.name                   = t.name.c_str();
    table.target                 = t.target.c_str();
    table.compiler               = t.compiler.c_str();
    table.flags                  = t.flags.c_str();
    table.version                = t.version.c_str();
    table.jax_version            = t.jax_version.c_str();
    table.ids                    = t.ids.c_str();
    table.id_offsets             = t.id_offsets.data();
    table.hlo_sha256             = t.hlo_sha256.c_str();
    table.kernel_neff            = t.kernel_neff.data();
    table.key_words              = t.key_words.data();
    table.key_offsets            = t.key_offsets.data();
    table.slots                  = t.slots.data();
    table.neff_data              = t.neff_data.data();
    table.neff_offsets           = t.neff_offsets.data();
    table.neff_sizes             = t.neff_sizes.data();
}

}  // namespace

neuron_kernels * neuron_tree_open(const std::string & folder, std::string & message) {
    auto t = std::make_unique<tree>();
    try {
        read_index(folder, *t);
    } catch (const std::exception & error) {
        message = folder + "/index.json: " + error.what();
        return nullptr;
    }
    char             text[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * handle = nullptr;
    if (neuron_kernels_open_embedded(&t->table, &handle, text, sizeof(text)) != NEURON_KERNELS_OK) {
        message = folder + ": " + text;
        return nullptr;
    }
    t.release();
    return handle;
}
