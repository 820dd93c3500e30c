// Tests which bundles the library rejects, with which status, and that the message states the mistake and its place.

#include "check.h"
#include "neuron_kernels.h"
#include "pack_builder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

using test::pack;
using test::raw;

// Puts the bytes into a heap block of exactly their size, so that AddressSanitizer detects a read past the end.
static neuron_kernels_status open_exactly(const std::string & bytes, std::string & message) {
    const std::unique_ptr<char[]> block(new char[bytes.size()]);
    memcpy(block.get(), bytes.data(), bytes.size());
    char                        buffer[NEURON_KERNELS_MESSAGE_SIZE] = "untouched";
    neuron_kernels *            bundle                              = reinterpret_cast<neuron_kernels *>(1);
    const neuron_kernels_status status =
        neuron_kernels_open_memory(block.get(), bytes.size(), &bundle, buffer, sizeof(buffer));
    message = buffer;
    CHECK((status == NEURON_KERNELS_OK) == (bundle != nullptr));
    CHECK((status == NEURON_KERNELS_OK) == message.empty());
    neuron_kernels_close(bundle);
    return status;
}

static void refuses(const char * what, const std::string & bytes, neuron_kernels_status expected, const char * part) {
    std::string                 message;
    const neuron_kernels_status status = open_exactly(bytes, message);
    CHECK_MSG(status == expected, "%s: %s: %s", what, neuron_kernels_status_name(status), message.c_str());
    CHECK_MSG(message.find(part) != std::string::npos, "%s: '%s' is not in '%s'", what, part, message.c_str());
}

// The statuses of wrong packs. tests/data/broken-bundles.json has the messages, and tests/backend compares verdicts on
// random changes with kernelgen's.
static void test_wrong_packs() {
    constexpr neuron_kernels_status NOT_A_PACK = NEURON_KERNELS_ERROR_NOT_A_PACK;
    constexpr neuron_kernels_status VERSION    = NEURON_KERNELS_ERROR_VERSION;
    constexpr neuron_kernels_status CORRUPT    = NEURON_KERNELS_ERROR_CORRUPT;

    const pack  right = test::make_pack(test::sample_kernels());
    std::string message;
    CHECK_MSG(open_exactly(right.bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());
    CHECK_MSG(open_exactly(test::make_pack(test::sample_graphs()).bytes(), message) == NEURON_KERNELS_OK, "%s",
              message.c_str());

    const auto wrong = [&](const char * what, neuron_kernels_status status, const char * part,
                           const std::function<void(pack &)> & change) {
        pack changed = right;
        change(changed);
        refuses(what, changed.bytes(), status, part);
    };
    refuses("empty", "", NOT_A_PACK, "empty; expected a GGUF file");
    refuses("short", "GGU", NOT_A_PACK, "not a GGUF file");
    wrong("magic", NOT_A_PACK, "does not start with the bytes 'GGUF'", [](pack & p) { p.magic = "GGML"; });
    wrong("version", VERSION, "of version 2; expected version 3", [](pack & p) { p.version = 2; });
    wrong("byte order", VERSION, "bytes swapped", [](pack & p) { p.version = 0x03000000; });
    refuses("header", right.bytes().substr(0, 10), CORRUPT, "the number of tensors at byte 8");
    wrong("array length", CORRUPT, "metadata 'x' at byte", [](pack & p) {
        // 2^61 items of 8 bytes are 0 bytes when the product overflows.
        p.values.push_back({ "x", test::ARRAY, raw(test::U64) + raw(uint64_t(1) << 61) });
    });
    wrong("tensor", CORRUPT, "is a duplicate", [](pack & p) { p.tensors[1].name = p.tensors[0].name; });
    wrong("tensor", CORRUPT, "expected 64", [](pack & p) { p.tensors[1].offset = 128; });
    wrong("tensor", CORRUPT, "18446744073709551615 bytes", [](pack & p) { p.tensors[1].size = UINT64_MAX; });
    wrong("nothing", NOT_A_PACK, "without 'general.architecture'", [](pack & p) { p.erase("general.architecture"); });
    wrong("format", VERSION, "of format 4; this library reads format 3",
          [](pack & p) { p.set("kernelgen.format", test::U32, raw<uint32_t>(4)); });
    wrong("missing", CORRUPT, "metadata 'kernelgen.lnc' is missing", [](pack & p) { p.erase("kernelgen.lnc"); });
    // Every slot holds the same kernel: a search without a limit never ends.
    wrong("slots", CORRUPT, "is 1; expected ", [](pack & p) {
        p.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, std::vector<uint32_t>(32, 1)));
    });
}

// Unknown additions, as a later kernelgen may make, are ignored.
static void test_unknown_things_are_ignored() {
    pack p = test::make_pack(test::sample_kernels());
    p.values.insert(p.values.begin(), { "kernelgen.later", test::ARRAY, test::array<int32_t>(test::I32, { 1, 2 }) });
    p.erase("general.name");
    p.erase("kernelgen.kernel.specs");
    std::string message;
    CHECK_MSG(open_exactly(p.bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());

    // A tensor type that ggml may add later: lookups of this type fail, and other lookups find their kernels.
    pack                        later = test::make_pack({ test::sample_kernels()[7] });
    std::vector<uint64_t>       words = test::key_words(test::sample_kernels()[7]);
    const std::vector<uint32_t> ends  = { 0, static_cast<uint32_t>(words.size()) };
    words[2]                          = 1000;
    later.set("kernelgen.key.words", test::ARRAY, test::array(test::U64, words));
    later.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, nk::make_slots(words, ends)));
    CHECK_MSG(open_exactly(later.bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());
}

static void test_memory_of_programs() {
    pack             p = test::make_pack(test::sample_kernels());
    neuron_kernels * bundle;
    std::string      bytes = p.bytes();
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    CHECK(neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, message, sizeof(message)) ==
          NEURON_KERNELS_OK);
    CHECK(!neuron_kernels_neff_memory(bundle, 0));  // a pack of an earlier kernelgen
    neuron_kernels_close(bundle);

    test::add_memory(p);
    bytes = p.bytes();
    CHECK(neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, message, sizeof(message)) ==
          NEURON_KERNELS_OK);
    for (int32_t i = 0; i < (int32_t) neuron_kernels_count(bundle); i++) {
        const std::vector<uint64_t> expected = test::neff_memory((size_t) neuron_kernels_neff_index(bundle, i));
        const uint64_t *            memory   = neuron_kernels_neff_memory(bundle, i);
        CHECK_MSG(memory && std::equal(expected.begin(), expected.end(), memory), "kernel %d", i);
    }
    CHECK(!neuron_kernels_neff_memory(bundle, -1));
    CHECK(!neuron_kernels_neff_memory(bundle, (int32_t) neuron_kernels_count(bundle)));
    CHECK(!neuron_kernels_neff_memory(nullptr, 0));
    neuron_kernels_close(bundle);

    const auto wrong = [&](size_t n, uint64_t last, const char * part) {
        std::vector<uint64_t> figures(n);
        figures.back() = last;
        p.set("kernelgen.neff.memory", test::ARRAY, test::array(test::U64, figures));
        std::string said;
        CHECK(open_exactly(p.bytes(), said) == NEURON_KERNELS_ERROR_CORRUPT);
        CHECK_MSG(said.find(part) != std::string::npos, "%s", said.c_str());
    };
    wrong(23, 0, "'kernelgen.neff.memory': has 23 items; expected 24");
    wrong(25, 0, "'kernelgen.neff.memory': has 25 items; expected 24");
    wrong(24, (uint64_t(1) << 40) + 1, "item 23 is 1099511627777 bytes; expected at most 1099511627776");
}

static void test_files(const std::string & folder) {
    char       message[NEURON_KERNELS_MESSAGE_SIZE];
    const auto open = [&](const std::string & path) {
        neuron_kernels *            bundle;
        const neuron_kernels_status status = neuron_kernels_open_file(path.c_str(), &bundle, message, sizeof(message));
        CHECK((status == NEURON_KERNELS_OK) == (bundle != nullptr));
        CHECK(status == NEURON_KERNELS_OK || std::string(message).rfind(path + ": ", 0) == 0);
        neuron_kernels_close(bundle);
        return status;
    };
    const auto write = [&](const std::string & path, const std::string & bytes) {
        FILE * file = fopen(path.c_str(), "wb");
        CHECK(file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
        fclose(file);
    };
    CHECK(open(folder) == NEURON_KERNELS_ERROR_IO && strstr(message, "a directory; expected a regular file"));
    CHECK(open(folder + "/missing") == NEURON_KERNELS_ERROR_IO && strstr(message, strerror(ENOENT)));
    CHECK(open("/dev/null") == NEURON_KERNELS_ERROR_IO && strstr(message, "expected a regular file"));

    const std::string path = folder + "/open_test.gguf";
    CHECK(mkfifo(path.c_str(), 0600) == 0);
    CHECK(open(path) == NEURON_KERNELS_ERROR_IO && strstr(message, "expected a regular file"));
    unlink(path.c_str());
    write(path, "");
    CHECK(open(path) == NEURON_KERNELS_ERROR_NOT_A_PACK && strstr(message, "empty"));
    write(path, "# text\n");
    CHECK(open(path) == NEURON_KERNELS_ERROR_NOT_A_PACK && strstr(message, "not a GGUF file"));

    const std::vector<test::kernel> kernels = test::sample_kernels();
    write(path, test::make_pack(kernels).bytes());
    CHECK_MSG(open(path) == NEURON_KERNELS_OK, "%s", message);

    // The library owns the index: a later change of the file changes NEFF bytes and nothing else.
    neuron_kernels * bundle;
    CHECK(neuron_kernels_open_file(path.c_str(), &bundle, nullptr, 0) == NEURON_KERNELS_OK);
    CHECK(truncate(path.c_str(), 0) == 0);
    for (size_t i = 0; i < kernels.size(); i++) {
        CHECK(test::find(bundle, kernels[i]) == static_cast<int32_t>(i));
        CHECK(neuron_kernels_find_id(bundle, test::kernel_id(i).c_str()) == static_cast<int32_t>(i));
        size_t size = 0;
        CHECK(neuron_kernels_neff(bundle, static_cast<int32_t>(i), &size) && size > 0);
        std::string copy(size, '\0');
        const auto  status =
            neuron_kernels_read(bundle, static_cast<int32_t>(i), copy.data(), size, message, sizeof(message));
        CHECK(status == NEURON_KERNELS_ERROR_CORRUPT && strstr(message, "replace a pack by renaming another one over"));
    }
    // The library reads the file that it opened, even after another file takes its name.
    write(path, test::make_pack(kernels).bytes());
    CHECK(neuron_kernels_verify(bundle, 0, message, sizeof(message)) == NEURON_KERNELS_OK && !*message);
    unlink(path.c_str());
    write(path, "another");
    CHECK(neuron_kernels_verify(bundle, 0, message, sizeof(message)) == NEURON_KERNELS_OK && !*message);
    neuron_kernels_close(bundle);
    unlink(path.c_str());
}

// A NEFF is hashed once, and again after the file changed.
static void test_overwritten_neffs(const std::string & folder) {
    const std::string path  = folder + "/overwritten.gguf";
    const std::string bytes = test::make_pack(test::sample_kernels()).bytes();
    FILE *            file  = fopen(path.c_str(), "wb+");
    CHECK(file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && fflush(file) == 0);
    sleep(2);  // a file that changed just now is hashed each time
    neuron_kernels * bundle;
    CHECK(neuron_kernels_open_file(path.c_str(), &bundle, nullptr, 0) == NEURON_KERNELS_OK);
    size_t       size = 0;
    const auto * neff = static_cast<const char *>(neuron_kernels_neff(bundle, 0, &size));
    std::string  copy(size, '\0');
    const auto   read = [&] {
        return neuron_kernels_read(bundle, 0, copy.data(), size, nullptr, 0);
    };
    CHECK(read() == NEURON_KERNELS_OK);
    CHECK(read() == NEURON_KERNELS_OK);
    const size_t at = bytes.find(std::string(neff, size));
    CHECK(fseek(file, static_cast<long>(at), SEEK_SET) == 0 && fputc(bytes[at] ^ 1, file) >= 0 && fflush(file) == 0);
    CHECK(read() == NEURON_KERNELS_ERROR_CORRUPT);
    neuron_kernels_close(bundle);
    fclose(file);
    unlink(path.c_str());
}

static void test_arguments() {
    const std::string bytes = test::make_pack(test::sample_kernels()).bytes();
    char              message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels *  bundle = reinterpret_cast<neuron_kernels *>(1);
    CHECK(neuron_kernels_open_memory(nullptr, 5, &bundle, message, sizeof(message)) == NEURON_KERNELS_ERROR_ARGUMENT);
    CHECK(!bundle && strstr(message, "NULL"));
    CHECK(neuron_kernels_open_file(nullptr, &bundle, nullptr, 0) == NEURON_KERNELS_ERROR_ARGUMENT);
    CHECK(neuron_kernels_open_file("x", nullptr, message, sizeof(message)) == NEURON_KERNELS_ERROR_ARGUMENT);
    CHECK(neuron_kernels_open_embedded(nullptr, &bundle, message, sizeof(message)) == NEURON_KERNELS_ERROR_ARGUMENT);

    // A message is cut to the buffer's size.
    char small[9] = "########";
    CHECK(neuron_kernels_open_memory("no pack", 7, &bundle, small, 5) == NEURON_KERNELS_ERROR_NOT_A_PACK);
    CHECK(strcmp(small, "pack") == 0 && strcmp(small + 5, "###") == 0);
    CHECK(neuron_kernels_open_memory("no pack", 7, &bundle, small, 0) == NEURON_KERNELS_ERROR_NOT_A_PACK);
    for (int status = -1; status < 10; status++) {
        CHECK(neuron_kernels_status_name(static_cast<neuron_kernels_status>(status)) != nullptr);
    }
}

static void test_embedded_versions() {
    neuron_kernels_table table = {};
    neuron_kernels *     bundle;
    char                 message[NEURON_KERNELS_MESSAGE_SIZE];
    table.struct_size = sizeof(table) - 8;
    table.format      = NEURON_KERNELS_FORMAT;
    CHECK(neuron_kernels_open_embedded(&table, &bundle, message, sizeof(message)) == NEURON_KERNELS_ERROR_VERSION);
    CHECK(strstr(message, "embedded bundle: its table has"));
    table.struct_size = sizeof(table) + 8;  // a later, longer table with the same members up to here
    CHECK(neuron_kernels_open_embedded(&table, &bundle, message, sizeof(message)) == NEURON_KERNELS_OK);
    neuron_kernels_close(bundle);
    table.format = NEURON_KERNELS_FORMAT + 1;
    CHECK(neuron_kernels_open_embedded(&table, &bundle, message, sizeof(message)) == NEURON_KERNELS_ERROR_VERSION);
    CHECK(strstr(message, "it has format 4; this library reads format 3"));
}

static void test_embedded_neffs_are_verified() {
    const std::string    neffs     = test::neff_bytes(0) + test::neff_bytes(1);
    const uint64_t       sizes[]   = { test::neff_bytes(0).size(), test::neff_bytes(1).size() };
    const uint64_t       offsets[] = { 0, sizes[0] };
    const uint32_t       numbers[] = { 1, 0, 1 };
    const uint64_t       memory[]  = { 1, 2, 3, 4, 5, 6 };
    const std::string    digests   = test::digest_of(test::neff_bytes(0)) + '\0' + test::digest_of(test::neff_bytes(1));
    std::string          damaged   = neffs;
    neuron_kernels *     bundle;
    char                 message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels_table table = {};
    damaged.back() ^= 1;  // a byte of the second NEFF
    table.struct_size  = sizeof(table);
    table.format       = NEURON_KERNELS_FORMAT;
    table.n_kernels    = 3;
    table.n_neffs      = 2;
    table.kernel_neff  = numbers;
    table.neff_offsets = offsets;
    table.neff_sizes   = sizes;
    table.neff_sha256  = digests.c_str();
    table.neff_memory  = memory;
    for (const std::string * data : { &neffs, (const std::string *) &damaged }) {
        table.neff_data = reinterpret_cast<const uint8_t *>(data->data());
        CHECK(neuron_kernels_open_embedded(&table, &bundle, message, sizeof(message)) == NEURON_KERNELS_OK);
        CHECK(neuron_kernels_neff_memory(bundle, 0) == memory + NEURON_KERNELS_N_MEMORY);
        for (int32_t i = 0; i < 3; i++) {
            const bool good = data == &neffs || numbers[i] == 0;
            CHECK(neuron_kernels_verify(bundle, i, message, sizeof(message)) ==
                  (good ? NEURON_KERNELS_OK : NEURON_KERNELS_ERROR_CORRUPT));
            CHECK(good ? !*message : strstr(message, "its NEFF is damaged: the SHA-256 of its") != nullptr);
        }
        neuron_kernels_close(bundle);
    }
}

int main() {
    const char * folder = getenv("TEST_TMPDIR");
    char         made[] = "/tmp/neuron_kernels_XXXXXX";
    if (!folder && !(folder = mkdtemp(made))) {
        perror("mkdtemp");
        return 1;
    }
    test_wrong_packs();
    test_unknown_things_are_ignored();
    test_memory_of_programs();
    test_files(folder);
    test_overwritten_neffs(folder);
    test_arguments();
    test_embedded_versions();
    test_embedded_neffs_are_verified();
    rmdir(made);
    return test_result();
}
