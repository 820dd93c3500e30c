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

static void test_wrong_packs() {
    constexpr neuron_kernels_status NOT_A_PACK = NEURON_KERNELS_ERROR_NOT_A_PACK;
    constexpr neuron_kernels_status VERSION    = NEURON_KERNELS_ERROR_VERSION;
    constexpr neuron_kernels_status CORRUPT    = NEURON_KERNELS_ERROR_CORRUPT;

    const std::vector<test::kernel> kernels = test::sample_kernels();
    const pack                      right   = test::make_pack(kernels);
    const uint32_t                  n       = static_cast<uint32_t>(kernels.size());
    std::string                     message;
    CHECK_MSG(open_exactly(right.bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());

    const auto wrong = [&](const char * what, neuron_kernels_status status, const char * part,
                           const std::function<void(pack &)> & change) {
        pack changed = right;
        change(changed);
        refuses(what, changed.bytes(), status, part);
    };
    // Changes one item of an array of numbers.
    const auto item = [&](const char * key, uint32_t type, size_t i, uint64_t value, const char * part) {
        wrong(key, CORRUPT, part, [&](pack & p) {
            const size_t size = type == test::U64 ? 8 : 4;
            memcpy(&p.at(key).bytes[12 + i * size], &value, size);
        });
    };

    // GGUF
    refuses("empty", "", NOT_A_PACK, "empty; expected a GGUF file");
    refuses("short", "GGU", NOT_A_PACK, "not a GGUF file");
    wrong("magic", NOT_A_PACK, "does not start with the bytes 'GGUF'", [](pack & p) { p.magic = "GGML"; });
    wrong("version", VERSION, "of version 2; expected version 3", [](pack & p) { p.version = 2; });
    wrong("byte order", VERSION, "bytes swapped", [](pack & p) { p.version = 0x03000000; });
    refuses("header", right.bytes().substr(0, 10), CORRUPT, "the number of tensors at byte 8");
    wrong("values", CORRUPT, "truncated or corrupt", [](pack & p) { p.extra_values = 1; });
    wrong("values", CORRUPT, "truncated or corrupt", [](pack & p) { p.extra_values = UINT64_MAX / 2; });
    wrong("tensors", CORRUPT, "", [](pack & p) { p.extra_tensors = UINT64_MAX / 2; });
    wrong("key", CORRUPT, "metadata 'kernelgen.lnc' at byte",
          [](pack & p) { p.values.push_back(p.at("kernelgen.lnc")); });
    wrong("key", CORRUPT, "is empty", [](pack & p) { p.values.push_back({ "", test::U32, raw(1) }); });
    wrong("type", CORRUPT, "metadata 'x' at byte", [](pack & p) { p.values.push_back({ "x", 13, raw(1) }); });
    wrong("nested arrays", CORRUPT, "for the items of an array",
          [](pack & p) { p.values.push_back({ "x", test::ARRAY, raw(test::ARRAY) + raw(uint64_t(0)) }); });
    wrong("array length", CORRUPT, "metadata 'x' at byte", [](pack & p) {
        // 2^61 items of 8 bytes are 0 bytes when the product overflows.
        p.values.push_back({ "x", test::ARRAY, raw(test::U64) + raw(uint64_t(1) << 61) });
    });
    wrong("string length", CORRUPT, "metadata 'x'",
          [](pack & p) { p.values.push_back({ "x", test::STRING, raw(UINT64_MAX) }); });
    wrong("alignment", CORRUPT, "not a power of two",
          [](pack & p) { p.set("general.alignment", test::U32, raw<uint32_t>(0)); });
    wrong("alignment", CORRUPT, "not a power of two",
          [](pack & p) { p.set("general.alignment", test::U32, raw<uint32_t>(48)); });
    wrong("alignment", CORRUPT, "", [](pack & p) { p.set("general.alignment", test::U32, raw<uint32_t>(32)); });
    wrong("alignment", CORRUPT, "is string; expected u32",
          [](pack & p) { p.set("general.alignment", test::STRING, test::text("64")); });
    wrong("alignment", CORRUPT, "", [](pack & p) { p.set("general.alignment", test::U32, raw<uint32_t>(1U << 31)); });
    wrong("tensor", CORRUPT, "is a duplicate", [](pack & p) { p.tensors[1].name = p.tensors[0].name; });
    wrong("tensor", CORRUPT, "expected 1 to 63", [](pack & p) { p.tensors[1].name = std::string(64, 'n'); });
    wrong("tensor", CORRUPT, "has 2 dimensions", [](pack & p) { p.tensors[1].n_dims = 2; });
    wrong("tensor", CORRUPT, "has type 0; expected I8", [](pack & p) { p.tensors[1].type = 0; });
    wrong("tensor", CORRUPT, "expected 64", [](pack & p) { p.tensors[1].offset = 128; });
    wrong("tensor", CORRUPT, "expected 64", [](pack & p) { p.tensors[1].offset = 0; });
    wrong("tensor", CORRUPT, "0 bytes", [](pack & p) { p.tensors[1].size = 0; });
    wrong("tensor", CORRUPT, "18446744073709551615 bytes", [](pack & p) { p.tensors[1].size = UINT64_MAX; });
    wrong("tensor", CORRUPT, "truncated", [](pack & p) { p.tensors.back().size = 100000; });

    // kind of file
    wrong("model", NOT_A_PACK, "of architecture 'llama'; expected 'neuron-kernels'",
          [](pack & p) { p.set("general.architecture", test::STRING, test::text("llama")); });
    wrong("model", NOT_A_PACK, "of architecture 'll?ma'",
          [](pack & p) { p.set("general.architecture", test::STRING, test::text("ll\033ma")); });
    wrong("nothing", NOT_A_PACK, "without 'general.architecture'", [](pack & p) { p.erase("general.architecture"); });
    wrong("format", VERSION, "of format 4; this library reads format 3",
          [](pack & p) { p.set("kernelgen.format", test::U32, raw<uint32_t>(4)); });
    wrong("format", VERSION, "of format 2; this library reads format 3",
          [](pack & p) { p.set("kernelgen.format", test::U32, raw<uint32_t>(2)); });

    // metadata
    for (const pack::value & value : right.values) {
        const bool unused = value.key == "general.name" || value.key == "kernelgen.kernel.specs" ||
                            value.key == "general.alignment" || value.key == "general.architecture";
        if (unused) {
            continue;
        }
        wrong(value.key.c_str(), CORRUPT, ("metadata '" + value.key + "' is missing").c_str(),
              [&](pack & p) { p.erase(value.key); });
        wrong(value.key.c_str(), CORRUPT, ("metadata '" + value.key + "' at byte").c_str(),
              [&](pack & p) { p.set(value.key, test::I32, raw(1)); });
        if (value.type == test::ARRAY) {
            wrong(value.key.c_str(), CORRUPT, ("metadata '" + value.key + "' at byte").c_str(),
                  [&](pack & p) { p.set(value.key, test::ARRAY, test::array<int32_t>(test::I32, { 1 })); });
        }
        if (value.type == test::ARRAY && value.key != "kernelgen.flags") {
            const uint32_t type = *reinterpret_cast<const uint8_t *>(value.bytes.data());
            wrong(value.key.c_str(), CORRUPT, "metadata 'kernelgen.",
                  [&](pack & p) { p.set(value.key, test::ARRAY, raw(type) + raw(uint64_t(0))); });
        }
        if (value.type == test::STRING) {
            wrong(value.key.c_str(), CORRUPT, "NUL",
                  [&](pack & p) { p.set(value.key, test::STRING, test::text(std::string("a\0b", 3))); });
        }
    }
    wrong("flags", CORRUPT, "NUL", [](pack & p) {
        p.set("kernelgen.flags", test::ARRAY, test::array<std::string>(test::STRING, { std::string(1, '\0') }));
    });
    wrong("lnc", CORRUPT, "lnc is 0", [](pack & p) { p.set("kernelgen.lnc", test::U32, raw<uint32_t>(0)); });
    wrong("an unknown bool", CORRUPT, "expected a bool",
          [](pack & p) { p.values.push_back({ "x", test::BOOL, "\2" }); });
    wrong("simulated", CORRUPT, "expected a bool", [](pack & p) { p.at("kernelgen.simulated").bytes = "\2"; });

    // ids and digests
    const auto strings = [&](const char * key, size_t i, const std::string & value, const char * part) {
        wrong(key, CORRUPT, part, [&](pack & p) {
            std::vector<std::string> items;
            const uint8_t *          next = reinterpret_cast<const uint8_t *>(p.at(key).bytes.data());
            uint64_t                 count;
            memcpy(&count, next + 4, 8);
            next += 12;
            for (uint64_t j = 0; j < count; j++) {
                uint64_t size;
                memcpy(&size, next, 8);
                items.emplace_back(reinterpret_cast<const char *>(next + 8), size);
                next += 8 + size;
            }
            items[i] = value;
            p.set(key, test::ARRAY, test::array(test::STRING, items));
        });
    };
    strings("kernelgen.kernel.ids", 3, "", "item 3 is ''");
    strings("kernelgen.kernel.ids", 3, std::string(64, 'z'), "not a kernel id");
    strings("kernelgen.kernel.ids", 3, std::string("a\0b", 3), "not a kernel id");
    strings("kernelgen.kernel.ids", 3, test::kernel_id(2), "does not come after");
    strings("kernelgen.kernel.ids", 3, "aaa", "item 3, 'aaa', does not come after 'kernel-0000002'");
    strings("kernelgen.kernel.hlo_sha256", 2, std::string(63, 'a'), "expected 64 hexadecimal digits");
    strings("kernelgen.kernel.hlo_sha256", 2, std::string(64, 'G'), "expected 64 hexadecimal digits");
    strings("kernelgen.neff.sha256", 2, std::string(64, 'x'), "expected 64 hexadecimal digits");
    strings("kernelgen.neff.sha256", 2, std::string(64, 'a'), "belongs to a tensor 'neff.aaaaaaaa");

    // index
    item("kernelgen.kernel.neff", test::U32, 2, n - 1, "item 2 is 8; there are 8 NEFFs");
    item("kernelgen.kernel.neff", test::U32, 2, UINT32_MAX, "item 2 is 4294967295");
    item("kernelgen.key.offsets", test::U32, 0, 1, "goes from 1");
    item("kernelgen.key.offsets", test::U32, n, 1, "goes from 0 to 1");
    item("kernelgen.key.offsets", test::U32, 2, UINT32_MAX, "expected more than 4294967295");
    item("kernelgen.key.offsets", test::U32, 2, 0, "item 2 is 0; expected more than");
    item("kernelgen.key.slots", test::U32, 0, n + 1, "item 0 is 10; expected ");
    item("kernelgen.key.slots", test::U32, 0, UINT32_MAX, "item 0 is 4294967295");
    for (const size_t size : { 0, 16, 31, 64 }) {
        wrong("slots", CORRUPT, "items; expected 32", [&](pack & p) {
            p.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, std::vector<uint32_t>(size)));
        });
    }
    wrong("slots", CORRUPT, "is 0; expected ", [](pack & p) {
        p.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, std::vector<uint32_t>(32)));
    });
    wrong("slots", CORRUPT, "as the keys have it", [&](pack & p) {
        std::vector<uint32_t> slots(32);  // the order of the kernels: a search in it finds almost nothing
        for (uint32_t i = 0; i < n; i++) {
            slots[i] = i + 1;
        }
        p.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, slots));
    });
    // Every slot holds the same kernel: a search without a limit never ends.
    wrong("slots", CORRUPT, "is 1; expected ", [](pack & p) {
        p.set("kernelgen.key.slots", test::ARRAY, test::array(test::U32, std::vector<uint32_t>(32, 1)));
    });

    // keys
    const auto key_word = [&](size_t i, uint64_t value, const char * part) {
        item("kernelgen.key.words", test::U64, i, value, part);
    };
    key_word(1, 1, "key of kernel 'kernel-0000000', from item 0: its length does not fit");
    key_word(1, 16, "its length does not fit");
    key_word(1, 17, "more inputs than any");
    key_word(1, 0xFFFFFFFF, "more inputs than any");
    key_word(1, 2 | uint64_t(3) << 32, "shares the memory of an input that it does not have");
    key_word(2, uint64_t(1) << 31, "impossible type");
    key_word(3, 0, "not positive");
    key_word(3, UINT64_MAX, "not positive");
    key_word(7, UINT64_MAX, "2^63");
    key_word(9, 1, "not canonical");
    key_word(0, 1, "as the keys have it");
    wrong("quantized", CORRUPT, "not whole blocks", [](pack & p) {
        std::string & bytes = p.at("kernelgen.key.words").bytes;
        bytes[12 + 2 * 8]   = 12;  // 64 elements of q4_K
    });
    const auto one_key = [&](const char * what, std::vector<uint64_t> words, const char * part) {
        pack p = test::make_pack({ kernels[0] });
        p.set("kernelgen.key.words", test::ARRAY, test::array(test::U64, words));
        const uint32_t end = static_cast<uint32_t>(words.size());
        p.set("kernelgen.key.offsets", test::ARRAY, test::array<uint32_t>(test::U32, { 0, end }));
        refuses(what, p.bytes(), CORRUPT, part);
    };
    const std::vector<uint64_t> soft_max = test::key_words(kernels[4]);
    std::vector<uint64_t>       words    = soft_max;
    words[1]                             = 3 | uint64_t(2) << 32;
    one_key("alias", words, "an input that is absent");
    words = test::key_words(kernels[7]);
    words.insert(words.begin() + 2, nk::ABSENT_WORD);
    words[1] = 1;
    one_key("absent", words, "its last input is absent");
    words.pop_back();
    one_key("length", words, "its length does not fit");
    one_key("length", { 1, 0 }, "too short");

    // two kernels with one key
    std::vector<test::kernel> twice = kernels;
    twice.push_back(kernels[2]);
    refuses("twice", test::make_pack(twice).bytes(), CORRUPT, "'kernel-0000009' has the same key as 'kernel-0000002'");
}

// Each word of a graph's key is checked.
static void test_wrong_graphs() {
    constexpr neuron_kernels_status CORRUPT = NEURON_KERNELS_ERROR_CORRUPT;
    using input                             = test::graph::input;

    std::string                     message;
    const std::vector<test::kernel> right = test::sample_graphs();
    CHECK_MSG(open_exactly(test::make_pack(right).bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());

    const auto is = [&](const char * part, const test::kernel & k) {
        refuses("graph", test::make_pack({ k }).bytes(), CORRUPT, part);
    };
    const auto word = [&](size_t kernel, size_t i, uint64_t value, const char * part) {
        test::kernel k = right[kernel];
        k.words[i]     = value;
        is(part, k);
    };
    // the first graph: two words, three extents, nodes of 4 + 9 + 11 + 8 and 4 + 9 + 22 + 8 words
    constexpr size_t FIRST = 5, SECOND = FIRST + 32, THIRD = SECOND + 43;
    word(0, 1, 0 | uint64_t(3) << 32, "it has no nodes");
    word(0, 1, 65537 | uint64_t(3) << 32, "more nodes or slots than 65536");
    word(0, 1, 3 | uint64_t(65537) << 32, "more nodes or slots than 65536");
    word(0, 1, 4 | uint64_t(3) << 32, "its length does not fit its nodes");
    word(0, 1, 65536 | uint64_t(3) << 32, "its length does not fit its nodes");
    word(0, 1, 2 | uint64_t(3) << 32, "its length does not fit its nodes");
    word(0, 2, 0, "impossible extent");
    word(0, 2, uint64_t(1) << 63, "impossible extent");
    word(0, 2, 64 * 8 * 4 + 4, "not as large as its uses");
    word(0, 2, 64 * 8 * 4 - 4, "reaches beyond the slot");
    word(0, FIRST + 1, 17, "more inputs than any");
    word(0, FIRST + 1, 1 | uint64_t(2) << 32, "an impossible flag");
    word(0, FIRST + 1, 2, "");
    word(0, FIRST + 3, 4, "has an offset");
    word(0, FIRST + 4, uint64_t(1) << 31, "impossible type");
    word(0, FIRST + 5, 0, "not positive");
    word(0, FIRST + 13, 3, "not numbered in the order of their first use");
    word(0, FIRST + 13, 2, "an input that is computed after it");
    word(0, FIRST + 14, 4, "reaches beyond the slot");
    word(0, FIRST + 14, UINT64_MAX, "reaches beyond the slot");
    word(0, SECOND + 2, 2 * 1 + 1 + 1, "reaches beyond the slot");
    word(0, SECOND + 2, 2 * 1 + 0 + 1, "the memory of a node that is computed after it");
    word(0, SECOND + 13, 2 * 2, "an input that is computed after it");
    word(0, SECOND + 14, 4, "reaches beyond the node");
    word(0, SECOND + 24, 1, "not numbered in the order of their first use");
    word(0, THIRD + 1, 2, "nothing that it computes can be seen");
    word(1, 6, 1 | uint64_t(1) << 32, "");
    word(1, 5 + 1, 3 | uint64_t(1) << 32, "without memory of its own escapes");
    for (const test::kernel & k : right) {
        for (size_t n = 2; n < k.words.size(); n++) {
            test::kernel shorter = k;
            shorter.words.resize(n);
            is("", shorter);
        }
        test::kernel longer = k;
        longer.words.push_back(0);
        is("its length does not fit its nodes", longer);
    }

    const neuron_kernels_tensor t = test::dense(0, 64);
    const neuron_kernels_tensor absent{ NEURON_KERNELS_ABSENT, {}, {} };
    const input                 slot{ true, 0, 0, t }, other{ true, 1, 0, t }, first{ false, 0, 0, t };
    using test::graph;
    is("a slot is not used",
       graph{
           { 256, 256 }
    }
           .node("neg", { slot }, t, true)
           .done());
    is("not numbered",
       graph{
           { 256, 256 }
    }
           .node("add", { other, slot }, t, true)
           .done());
    is("the last input of a node is absent",
       graph{
           { 256 }
    }
           .node("add", { slot, { false, 0, 0, absent } }, t, true)
           .done());
    is("no memory of its own",
       graph{ { 256 } }.node("neg", { slot }, t, false, &slot).node("neg", { first }, t, true).done());
    is("not as large as its uses",
       graph{
           { 260 }
    }
           .node("neg", { { true, 0, 4, t } }, t, true)
           .done());
    // an unknown type, so the tensor's size is unknown
    neuron_kernels_tensor unknown = t;
    unknown.type                  = 1000;
    test::kernel k =
        graph{
            { 9999 }
    }
            .node("neg", { { true, 0, 0, unknown } }, t, true)
            .done();
    CHECK_MSG(open_exactly(test::make_pack({ k }).bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());
    // a node of ggml_cast: the source that it writes to is the node itself
    k = graph{ { 256 } }.node("cpy", { slot, first }, t, true).done();
    CHECK_MSG(open_exactly(test::make_pack({ k }).bytes(), message) == NEURON_KERNELS_OK, "%s", message.c_str());
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
    test_wrong_graphs();
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
