// Compares the library's keys and hashes with the golden file tests/data/bundle-keys.json.
//
//     key_test TABLE
//
// TABLE holds the golden file's vectors as lines: the fields of lookups.py and two more, the key's words and its hash,
// in hexadecimal.

#include "src/key.h"

#include "check.h"
#include "lookups.h"
#include "src/hash.h"

#include <cinttypes>

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s TABLE\n", argv[0]);
        return 2;
    }
    size_t        n = 0;
    std::ifstream file(argv[1]);
    for (std::string line; std::getline(file, line); n++) {
        const std::vector<std::string> fields = test::split(line, '\t');
        CHECK_MSG(fields.size() == 8, "line %zu", n + 1);
        if (fields.size() != 8) {
            break;
        }
        const test::lookup    k = test::parse_lookup(fields);
        std::vector<uint64_t> expected;
        for (const std::string & word : test::split(fields[6], ' ')) {
            expected.push_back(std::stoull(word, nullptr, 16));
        }
        nk::key    key;
        const bool made =
            nk::make_key(k.op.c_str(), k.op_params, k.inputs.data(), k.inputs.size(), k.output, k.alias, key);
        CHECK_MSG(made, "%s", k.id.c_str());
        if (!made) {
            continue;
        }
        CHECK_MSG(key.n_words == expected.size(), "%s: %zu words", k.id.c_str(), key.n_words);
        for (size_t i = 0; i < key.n_words && i < expected.size(); i++) {
            CHECK_MSG(key.words[i] == expected[i], "%s: word %zu is %016" PRIx64 ", expected %016" PRIx64, k.id.c_str(),
                      i, key.words[i], expected[i]);
        }
        const uint64_t hash = nk::hash_words(key.words, key.n_words);
        CHECK_MSG(hash == std::stoull(fields[7], nullptr, 16), "%s: hash %016" PRIx64, k.id.c_str(), hash);
    }
    CHECK_MSG(n > 0, "%s holds nothing", argv[1]);
    printf("%zu keys\n", n);
    return test_result();
}
