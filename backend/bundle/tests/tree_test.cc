// Tests the contents of an open tree, and which trees the library rejects.

#include "check.h"
#include "neuron_kernels.h"
#include "pack_builder.h"
#include "read_everything.h"
#include "src/hash.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

namespace fs = std::filesystem;

static constexpr neuron_kernels_status IO      = NEURON_KERNELS_ERROR_IO;
static constexpr neuron_kernels_status VERSION = NEURON_KERNELS_ERROR_VERSION;
static constexpr neuron_kernels_status CORRUPT = NEURON_KERNELS_ERROR_CORRUPT;

static const std::string DIGEST(64, 'a');

// Writes a new file each time: a file system may wait for the disk when a file is emptied and written again.
static void write(const fs::path & path, const std::string & bytes) {
    fs::remove(path);
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    CHECK_MSG(file.flush().good(), "%s", path.c_str());
}

static std::string neff_name(size_t i) {
    return "trn1/neff/" + std::to_string(i) + ".neff";
}

// Returns one kernel of an index; the last two kernels share a NEFF, as in `make_pack`.
static std::string entry(const std::vector<test::kernel> & kernels, size_t i) {
    const size_t neff = i + 1 < kernels.size() ? i : i - 1;
    char         part[17];
    std::string  key;
    for (const uint64_t word : test::key_words(kernels[i])) {
        std::snprintf(part, sizeof(part), "%016" PRIx64, word);
        key += part;
    }
    return "{\"id\":\"" + test::kernel_id(i) + "\",\"spec\":{\"params\":{\"eps\":1e-05,\"scale\":-0.125}},\"key\":\"" +
           key + "\",\"hlo_sha256\":\"" + DIGEST + "\",\"neff\":\"" + neff_name(neff) + "\",\"neff_sha256\":\"" +
           test::digest_of(test::neff_bytes(neff)) +
           "\",\"neff_size\":" + std::to_string(test::neff_bytes(neff).size()) + "}";
}

// Returns the index of a valid tree.
static std::string make_index(const std::vector<test::kernel> & kernels) {
    std::string text = "{\"compiler\":\"simulator "
                       "\\u00b5\\ud83d\\ude00\",\"flags\":[\"-O\",\"2\"],\"format\":3,\"jax_version\":\"0.10.2\","
                       "\"lnc\":1,\"name\":\"test\",\"simulated\":true,\"target\":\"trn1\",\"version\":\"0.1.0\","
                       "\"later\":[null,{}],\n"
                       "\"kernels\":[\n";
    for (size_t i = 0; i < kernels.size(); i++) {
        text += entry(kernels, i) + (i + 1 < kernels.size() ? ",\n" : "\n");
    }
    return text + "]}\n";
}

static void write_tree(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    fs::create_directories(folder / "trn1/neff");
    for (size_t i = 0; i + 1 < kernels.size(); i++) {
        write(folder / neff_name(i), test::neff_bytes(i));
    }
    write(folder / "index.json", make_index(kernels));
}

static neuron_kernels_status open_tree(const fs::path & folder, neuron_kernels ** bundle, std::string & message) {
    char                        buffer[NEURON_KERNELS_MESSAGE_SIZE] = "untouched";
    const neuron_kernels_status status = neuron_kernels_open_tree(folder.c_str(), bundle, buffer, sizeof(buffer));
    message                            = buffer;
    CHECK((status == NEURON_KERNELS_OK) == (*bundle != nullptr));
    CHECK((status == NEURON_KERNELS_OK) == message.empty());
    CHECK(message.empty() || message.rfind(folder.string() + "/index.json: ", 0) == 0);
    return status;
}

static std::string replaced(std::string text, const std::string & part, const std::string & with) {
    const size_t at = text.find(part);
    CHECK_MSG(at != std::string::npos, "'%s' is not in the index", part.c_str());
    return at == std::string::npos ? text : text.replace(at, part.size(), with);
}

static void test_every_kernel_is_found(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    neuron_kernels * bundle;
    std::string      message;
    CHECK_MSG(open_tree(folder, &bundle, message) == NEURON_KERNELS_OK, "%s", message.c_str());
    CHECK(neuron_kernels_count(bundle) == kernels.size());
    CHECK(neuron_kernels_neff_count(bundle) == kernels.size() - 1);
    for (size_t i = 0; i < kernels.size(); i++) {
        const int32_t     number   = static_cast<int32_t>(i);
        const size_t      neff     = i + 1 < kernels.size() ? i : i - 1;
        const std::string expected = test::neff_bytes(neff);
        size_t            size     = 0;
        const void *      data     = neuron_kernels_neff(bundle, number, &size);
        CHECK_MSG(test::find(bundle, kernels[i]) == number, "kernel %zu", i);
        CHECK(neuron_kernels_find_id(bundle, test::kernel_id(i).c_str()) == number);
        CHECK(size == expected.size() && memcmp(data, expected.data(), size) == 0);
        CHECK(neuron_kernels_neff_index(bundle, number) == static_cast<int32_t>(neff));
        CHECK(neuron_kernels_hlo_sha256(bundle, number) == DIGEST);
    }
    CHECK(strcmp(neuron_kernels_metadata(bundle, "name"), "test") == 0);
    CHECK(strcmp(neuron_kernels_metadata(bundle, "compiler"), "simulator \u00b5\U0001F600") == 0);
    CHECK(strcmp(neuron_kernels_metadata(bundle, "flags"), "-O\n2\n") == 0);
    CHECK(neuron_kernels_simulated(bundle) == 1 && neuron_kernels_lnc(bundle) == 1);
    neuron_kernels_close(bundle);
}

static void test_memory_of_programs(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    neuron_kernels * bundle;
    std::string      message;
    const auto       with = [&](size_t i, const std::vector<uint64_t> & memory) {
        const std::string line = entry(kernels, i);
        return line.substr(0, line.size() - 1) +
               ",\"neff_memory\":{\"later\":-1,\"scratchpad\":" + std::to_string(memory[2]) +
               ",\"rings\":" + std::to_string(memory[1]) + ",\"code\":" + std::to_string(memory[0]) + "}}";
    };
    std::string  text = make_index(kernels);
    const size_t last = kernels.size() - 1;  // shares the NEFF of the kernel before it
    CHECK(open_tree(folder, &bundle, message) == NEURON_KERNELS_OK);
    CHECK(!neuron_kernels_neff_memory(bundle, 0));
    neuron_kernels_close(bundle);
    for (size_t i = 0; i <= last; i++) {
        text = replaced(text, entry(kernels, i), with(i, test::neff_memory(std::min(i, last - 1))));
    }
    write(folder / "index.json", text);
    CHECK_MSG(open_tree(folder, &bundle, message) == NEURON_KERNELS_OK, "%s", message.c_str());
    for (size_t i = 0; i <= last; i++) {
        const std::vector<uint64_t> expected = test::neff_memory(std::min(i, last - 1));
        const uint64_t *            memory   = neuron_kernels_neff_memory(bundle, static_cast<int32_t>(i));
        CHECK_MSG(memory && std::equal(expected.begin(), expected.end(), memory), "kernel %zu", i);
    }
    neuron_kernels_close(bundle);

    const auto wrong = [&](const std::string & part, const std::string & with_what, const char * said) {
        write(folder / "index.json", replaced(text, part, with_what));
        CHECK(open_tree(folder, &bundle, message) == NEURON_KERNELS_ERROR_CORRUPT);
        CHECK_MSG(message.find(said) != std::string::npos, "%s", message.c_str());
    };
    const std::string shared = with(last, test::neff_memory(last - 1));
    for (const size_t i : { size_t(0), size_t(1), last }) {
        const std::string line = with(i, test::neff_memory(std::min(i, last - 1)));
        wrong(line, entry(kernels, i), "some kernels have 'neff_memory', and some don't");
    }
    wrong(shared, with(last, test::neff_memory(0)),
          "'neff_memory' differs from that of other kernels with this 'neff_sha256'");
    wrong("\"code\":64", "\"other\":64", "'code' is missing");
    wrong("\"code\":64", "\"code\":-64", "expected a count");
    wrong("\"code\":64", "\"code\":1099511627777", "expected a count");
    wrong("\"neff_memory\":{\"later\":-1,", "\"neff_memory\":7,\"x\":{", "'code' is missing in a number");
    write(folder / "index.json", make_index(kernels));
}

// Kernels are numbered by their ids, in any order in the file.
static void test_the_order_in_the_index_means_nothing(const fs::path &                  folder,
                                                      const std::vector<test::kernel> & kernels) {
    const std::string first = entry(kernels, 0) + ",\n";
    const std::string end   = "\n]}\n";
    std::string       text  = replaced(make_index(kernels), first, "");
    write(folder / "index.json", replaced(text, end, ",\n" + entry(kernels, 0) + end));
    test_every_kernel_is_found(folder, kernels);
}

static void test_wrong_trees(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    const std::string right   = make_index(kernels);
    const auto        refuses = [&](const std::string & text, neuron_kernels_status expected, const char * part) {
        write(folder / "index.json", text);
        neuron_kernels *            bundle;
        std::string                 message;
        const neuron_kernels_status status = open_tree(folder, &bundle, message);
        CHECK_MSG(status == expected, "%s: %s", neuron_kernels_status_name(status), message.c_str());
        CHECK_MSG(message.find(part) != std::string::npos, "'%s' is not in '%s'", part, message.c_str());
        neuron_kernels_close(bundle);
    };
    const auto wrong = [&](const std::string & old, const std::string & changed, const char * part,
                           neuron_kernels_status status = CORRUPT) {
        refuses(replaced(right, old, changed), status, part);
    };

    // JSON
    refuses("", CORRUPT, "a value expected at byte 0");
    refuses("{", CORRUPT, "a string expected at byte 1");
    refuses("[]", CORRUPT, "'format' is missing in an array at byte 0");
    refuses("{\"format\": 3} x", CORRUPT, "more after the end at byte 14");
    refuses(std::string(1000, '['), CORRUPT, "nested too deep");
    refuses("{\"a\" 1}", CORRUPT, "':' expected at byte 5");
    refuses("{\"a\":1 \"b\":1}", CORRUPT, "',' or '}' expected");
    refuses("[1 2]", CORRUPT, "',' or ']' expected");
    refuses("[1,]", CORRUPT, "a value expected at byte 3");
    for (const char * number : { "-", "1.", "1e", ".5", "+1", "NaN" }) {
        refuses(std::string("[") + number, CORRUPT, "a value expected");
    }
    refuses("[01]", CORRUPT, "',' or ']' expected");
    refuses("[\"\\x\"]", CORRUPT, "an unknown escape");
    refuses("[\"\\u00g0\"]", CORRUPT, "four hexadecimal digits expected");
    refuses("[\"\\u12", CORRUPT, "four hexadecimal digits expected");
    refuses("[\"\\ud83d\"]", CORRUPT, "half a character");
    refuses("[\"\\ude00\"]", CORRUPT, "half a character");
    refuses("[\"\\u0000\"]", CORRUPT, "a NUL");
    refuses(std::string("[\"a\0b\"]", 7), CORRUPT, "a control character");
    refuses("[\"abc", CORRUPT, "a string without an end at byte 5");
    refuses("[\"a\xff\"]", CORRUPT, "not UTF-8 at byte 3");
    refuses("{\"a\":[{\"b\":1,\"a\":{},\"b\":2}]}", CORRUPT, "the second member 'b' at byte 24");

    // header
    wrong("\"format\":3", "\"format\":4", "a tree of format 4; this library reads format 3", VERSION);
    for (const char * format : { "1e400", "-1", "1.5", "18446744073709551616" }) {
        wrong("\"format\":3", std::string("\"format\":") + format, "expected a count");
    }
    wrong("\"lnc\":1", "\"lnc\":4294967296", "expected a count");
    wrong("\"lnc\":1", "\"lnc\":0", "lnc is 0");
    wrong("\"format\":3", "\"format\":\"3\"", "is a string; expected a number");
    wrong("\"simulated\":true", "\"simulated\":1", "is a number; expected true or false");
    wrong("\"2\"]", "2]", "is not a string");
    for (const char * name : { "name", "target", "compiler", "version", "jax_version", "flags", "lnc", "kernels" }) {
        wrong(std::string("\"") + name + "\"", "\"other\"", (std::string("'") + name + "' is missing").c_str());
    }
    refuses(right.substr(0, right.find("\"kernels\":[") + 11) + "]}", CORRUPT, "'kernels' is empty");

    // kernels
    for (const char * name : { "id", "key", "hlo_sha256", "neff", "neff_sha256", "neff_size" }) {
        wrong(std::string("\"") + name + "\":", "\"other\":", (std::string("'") + name + "' is missing").c_str());
    }
    wrong(test::kernel_id(0), "", "'' is not a kernel id");
    wrong(test::kernel_id(0), std::string(64, 'z'), "is not a kernel id");
    wrong(test::kernel_id(1), test::kernel_id(0), "its id 'kernel-0000000' is a duplicate");
    wrong(DIGEST, DIGEST.substr(1), "'hlo_sha256' is 'aaa");
    wrong("\"neff_sha256\":\"", "\"neff_sha256\":\"G", "expected 64 hexadecimal digits");
    wrong("\"key\":\"", "\"key\":\"0", "not a sequence of words");
    wrong("\"key\":\"", "\"key\":\"000000000000000g", "not a sequence of words");
    wrong("\"key\":\"", "\"key\":\"000000000000000A", "not a sequence of words");
    wrong("\"key\":\"", "\"key\":\"0000000000000000", "its key: ");
    wrong("\"key\":\"", "\"key\":\"\",\"old\":\"", "its key: it is too short");
    const std::string line = entry(kernels, 2);
    wrong(entry(kernels, 1), replaced(line, test::kernel_id(2), test::kernel_id(1)),
          "kernel 'kernel-0000002' has the same key as 'kernel-0000001'");

    // NEFFs
    for (const char * path : { "", "/etc/passwd", "..", "trn1/../../x", "../x" }) {
        wrong(neff_name(0), path, "leads out of the tree");
    }
    wrong(neff_name(0), "trn1/neff/missing.neff", "trn1/neff/missing.neff: can't be opened", IO);
    wrong(neff_name(0), "trn1/neff", "trn1/neff: a directory; expected a regular file", IO);
    const std::string last = entry(kernels, kernels.size() - 1);  // shares the NEFF of the kernel before it
    wrong(last, replaced(last, neff_name(kernels.size() - 2), "../x"), "leads out of the tree");
    wrong(last, replaced(last, "\"neff_size\":", "\"neff_size\":1"), "'neff_size' is not ");
    fs::remove_all(folder / "trn1/neff/link.neff");
    fs::create_symlink("/etc/passwd", folder / "trn1/neff/link.neff");
    wrong(neff_name(0), "trn1/neff/link.neff", "a link that leads out of the tree");
    wrong("\"neff_size\":2", "\"neff_size\":3", "has 2 bytes, and 'neff_size' is 3");
    write(folder / "trn1/neff/empty.neff", "");
    const std::string digest = "\",\"neff_sha256\":\"" + test::digest_of(test::neff_bytes(0)) + "\",\"neff_size\":";
    wrong(neff_name(0) + digest + "2", "trn1/neff/empty.neff" + digest + "0", "has 0 bytes");
}

// A tree with a changed NEFF opens; reading or verifying that NEFF gives an error.
static void test_a_neff_that_is_not_the_indexs_is_noticed(const fs::path & folder) {
    neuron_kernels * bundle;
    std::string      message;
    char             text[NEURON_KERNELS_MESSAGE_SIZE];
    write(folder / neff_name(1), std::string(test::neff_bytes(1).size(), 'x'));
    CHECK_MSG(open_tree(folder, &bundle, message) == NEURON_KERNELS_OK, "%s", message.c_str());
    CHECK(neuron_kernels_verify(bundle, 0, text, sizeof(text)) == NEURON_KERNELS_OK && !*text);
    CHECK(neuron_kernels_verify(bundle, 1, text, sizeof(text)) == CORRUPT && strstr(text, "its NEFF is damaged"));
    neuron_kernels_close(bundle);
    write(folder / neff_name(1), test::neff_bytes(1));
}

// Gives a kernel the parameters that make its key's hash 0: the last word equals the hash state of the words before it.
static void let_hash_be_zero(test::kernel & k) {
    const std::vector<uint64_t> words = test::key_words(k);
    const uint64_t              last  = nk::hash_words(words.data(), words.size() - 1);
    memcpy(&k.op_params[14], &last, sizeof(last));
}

// Rejects an index whose keys all have the same hash: the time of a search would grow with the number of kernels.
static void test_keys_of_one_hash_are_refused(const fs::path & folder) {
    std::vector<test::kernel> kernels(2000, test::sample_kernels()[0]);
    for (size_t i = 0; i < kernels.size(); i++) {
        kernels[i].op_params[0] = (int32_t) i;
        let_hash_be_zero(kernels[i]);
    }
    write_tree(folder, kernels);
    neuron_kernels * bundle;
    std::string      message;
    CHECK(open_tree(folder, &bundle, message) == CORRUPT);
    CHECK_MSG(message.find("its keys have more equal hashes") != std::string::npos, "%s", message.c_str());
}

// Tests every truncation of an index.
static void test_truncation(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    const std::string right = make_index(kernels);
    neuron_kernels *  bundle;
    std::string       message;
    for (size_t size = 0; size < right.size() - 1; size++) {  // the last byte is a newline
        write(folder / "index.json", right.substr(0, size));
        CHECK_MSG(open_tree(folder, &bundle, message) == NEURON_KERNELS_ERROR_CORRUPT, "%zu bytes", size);
    }
}

// If a damaged tree opens, everything in it can be read.
static void test_random_damage(const fs::path & folder, const std::vector<test::kernel> & kernels) {
    const std::string right = make_index(kernels);
    std::mt19937_64   random(1);
    size_t            n_opened = 0;
    for (int round = 0; round < 4000; round++) {
        std::string changed = right;
        for (uint64_t i = random() % 3 + 1; i > 0; i--) {
            changed[random() % changed.size()] = static_cast<char>(random() % 128);
        }
        write(folder / "index.json", changed);
        neuron_kernels * bundle;
        std::string      message;
        if (open_tree(folder, &bundle, message) == NEURON_KERNELS_OK) {
            n_opened++;
            test::read_everything(bundle);
        }
        neuron_kernels_close(bundle);
    }
    CHECK(n_opened > 0 && n_opened < 4000);
}

static void test_arguments_and_missing_files(const fs::path & folder) {
    neuron_kernels * bundle = reinterpret_cast<neuron_kernels *>(1);
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    CHECK(neuron_kernels_open_tree(nullptr, &bundle, message, sizeof(message)) == NEURON_KERNELS_ERROR_ARGUMENT);
    CHECK(!bundle && strstr(message, "path: NULL"));
    CHECK(neuron_kernels_open_tree("x", nullptr, nullptr, 0) == NEURON_KERNELS_ERROR_ARGUMENT);
    std::string text;
    CHECK(open_tree(folder / "missing", &bundle, text) == NEURON_KERNELS_ERROR_IO);
    CHECK_MSG(text.find(strerror(ENOENT)) != std::string::npos, "%s", text.c_str());
    fs::create_directories(folder / "odd/index.json");
    CHECK(open_tree(folder / "odd", &bundle, text) == NEURON_KERNELS_ERROR_IO);
    CHECK_MSG(text.find("a directory; expected a regular file") != std::string::npos, "%s", text.c_str());
}

int main() {
    const char * given  = getenv("TEST_TMPDIR");
    std::string  made   = ((given ? fs::path(given) : fs::temp_directory_path()) / "tree_test_XXXXXX").string();
    const char * folder = mkdtemp(made.data());
    if (!folder) {
        perror(made.c_str());
        return 1;
    }
    const std::vector<test::kernel> kernels = test::sample_kernels();
    write_tree(folder, kernels);
    test_every_kernel_is_found(folder, kernels);
    test_the_order_in_the_index_means_nothing(folder, kernels);
    test_wrong_trees(folder, kernels);
    write_tree(folder, kernels);
    test_memory_of_programs(folder, kernels);
    write_tree(folder, kernels);
    test_a_neff_that_is_not_the_indexs_is_noticed(folder);
    test_truncation(folder, kernels);
    test_random_damage(folder, kernels);
    test_arguments_and_missing_files(folder);
    test_keys_of_one_hash_are_refused(fs::path(folder) / "hashes");
    fs::remove_all(folder);
    return test_result();
}
