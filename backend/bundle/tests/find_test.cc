// Tests which lookups find a kernel and which do not, and that a lookup allocates no memory.

#include "check.h"
#include "neuron_kernels.h"
#include "pack_builder.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

static size_t n_allocations = 0;

void * operator new(size_t size) {
    n_allocations++;
    if (void * p = std::malloc(size)) {
        return p;
    }
    throw std::bad_alloc();
}

void operator delete(void * p) noexcept {
    std::free(p);
}

void operator delete(void * p, size_t) noexcept {
    std::free(p);
}

using test::dense;
using test::find;
using test::kernel;

static void test_every_kernel_is_found(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    CHECK(neuron_kernels_count(bundle) == kernels.size());
    CHECK(neuron_kernels_neff_count(bundle) == kernels.size() - 1);
    for (size_t i = 0; i < kernels.size(); i++) {
        const int32_t number = static_cast<int32_t>(i);
        CHECK_MSG(find(bundle, kernels[i]) == number, "kernel %zu", i);
        CHECK(neuron_kernels_find_id(bundle, test::kernel_id(i).c_str()) == number);
        CHECK(neuron_kernels_id(bundle, number) == test::kernel_id(i));

        const size_t      neff     = i + 1 < kernels.size() ? i : i - 1;
        const std::string expected = test::neff_bytes(neff);
        size_t            size     = 0;
        const void *      data     = neuron_kernels_neff(bundle, number, &size);
        CHECK(size == expected.size() && memcmp(data, expected.data(), size) == 0);
        CHECK(neuron_kernels_neff_index(bundle, number) == static_cast<int32_t>(neff));

        const std::vector<uint64_t> words   = test::key_words(kernels[i]);
        size_t                      n_words = 0;
        const uint64_t *            key     = neuron_kernels_key(bundle, number, &n_words);
        CHECK(n_words == words.size() && memcmp(key, words.data(), n_words * 8) == 0);
        CHECK(strlen(neuron_kernels_hlo_sha256(bundle, number)) == 64);
    }
}

static void test_any_difference_is_a_miss(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    for (const kernel & original : kernels) {
        const auto misses = [&](const char * what, auto change) {
            kernel changed = original;
            change(changed);
            CHECK_MSG(find(bundle, changed) == NEURON_KERNELS_NOT_FOUND, "%s of %s changed", what, original.op.c_str());
        };
        misses("op", [](kernel & k) { k.op += "x"; });
        misses("op", [](kernel & k) { k.op.pop_back(); });
        misses("alias", [](kernel & k) { k.alias = k.alias == 0 ? NEURON_KERNELS_NO_ALIAS : 0; });
        misses("alias", [](kernel & k) { k.alias = -2; });
        for (int i = 0; i < NEURON_KERNELS_N_OP_PARAMS; i++) {
            misses("op_params", [&](kernel & k) { k.op_params[i] ^= 0x40; });
        }
        for (size_t i = 0; i <= original.inputs.size(); i++) {
            const auto tensor = [&](kernel & k) -> neuron_kernels_tensor & {
                return i < k.inputs.size() ? k.inputs[i] : k.output;
            };
            const neuron_kernels_tensor & unchanged = i < original.inputs.size() ? original.inputs[i] : original.output;
            if (unchanged.type == NEURON_KERNELS_ABSENT) {
                misses("an absent input", [&](kernel & k) { tensor(k) = dense(0, 16); });
                continue;
            }
            misses("type", [&](kernel & k) { tensor(k).type = 30; });
            misses("type", [&](kernel & k) { tensor(k).type = 4; });  // a number without a type
            misses("type", [&](kernel & k) { tensor(k).type = 1 << 30; });
            misses("type", [&](kernel & k) { tensor(k).type = -2; });
            for (int d = 0; d < 4; d++) {
                misses("ne", [&](kernel & k) { tensor(k).ne[d] *= 2; });
                misses("ne", [&](kernel & k) { tensor(k).ne[d] = 0; });
                misses("ne", [&](kernel & k) { tensor(k).ne[d] = INT64_MIN; });
                misses("ne", [&](kernel & k) { tensor(k).ne[d] = INT64_MAX; });
                if (unchanged.ne[d] > 1) {
                    misses("nb", [&](kernel & k) { tensor(k).nb[d] += 256; });
                    misses("nb", [&](kernel & k) { tensor(k).nb[d] = UINT64_MAX; });
                }
            }
            if (i < original.inputs.size()) {
                misses("presence", [&](kernel & k) { tensor(k).type = NEURON_KERNELS_ABSENT; });
                misses("number of inputs", [&](kernel & k) { k.inputs.insert(k.inputs.begin(), k.inputs[i]); });
            }
        }
    }
}

// Strides of dimensions with one element mean nothing, and ggml leaves any value in them.
static void test_meaningless_strides_are_ignored(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    for (size_t i = 0; i < kernels.size(); i++) {
        kernel     k      = kernels[i];
        const auto change = [](neuron_kernels_tensor & t) {
            for (int d = 1; d < 4; d++) {
                if (t.ne[d] == 1) {
                    t.nb[d] = 123456789 + static_cast<uint64_t>(d);
                }
            }
        };
        for (neuron_kernels_tensor & t : k.inputs) {
            change(t);
        }
        change(k.output);
        CHECK_MSG(find(bundle, k) == static_cast<int32_t>(i), "kernel %zu", i);
    }
}

static void test_names_and_absent_inputs(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    for (size_t i = 0; i < kernels.size(); i++) {
        kernel k = kernels[i];
        for (char & c : k.op) {
            c = static_cast<char>(toupper(c));
        }
        CHECK(find(bundle, k) == static_cast<int32_t>(i));

        // ggml has ten sources in every node; the backend may pass all of them.
        k.inputs.resize(10, {
                                NEURON_KERNELS_ABSENT, { -1, 0, 7, 0 },
                                 {}
        });
        CHECK(find(bundle, k) == static_cast<int32_t>(i));
        k.inputs.resize(10000, { NEURON_KERNELS_ABSENT, {}, {} });
        CHECK(find(bundle, k) == static_cast<int32_t>(i));
        k.inputs.back() = dense(0, 1);  // far more than any kernel has
        CHECK(find(bundle, k) == NEURON_KERNELS_NOT_FOUND);
    }
}

static void test_null_op_params_are_zeros(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    const kernel & add  = kernels[0];
    const kernel & norm = kernels[5];
    CHECK(neuron_kernels_find(bundle, "add", nullptr, add.inputs.data(), 2, &add.output, -1) == 0);
    CHECK(neuron_kernels_find(bundle, "rms_norm", nullptr, norm.inputs.data(), 1, &norm.output, -1) == -1);
}

static void test_ids(const neuron_kernels * bundle, size_t n) {
    CHECK(neuron_kernels_find_id(bundle, "") == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_id(bundle, "kernel-0000000x") == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_id(bundle, "kernel-000000") == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_id(bundle, "zzz") == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_id(bundle, test::kernel_id(n).c_str()) == NEURON_KERNELS_NOT_FOUND);
}

static void test_metadata(const neuron_kernels * bundle) {
    const auto is = [&](const char * name, const char * expected) {
        const char * value = neuron_kernels_metadata(bundle, name);
        CHECK_MSG(value && strcmp(value, expected) == 0, "%s is %s", name, value ? value : "NULL");
    };
    is("name", "test");
    is("target", "trn1");
    is("compiler", "simulator 1");
    is("flags", "-O\n2\n");
    is("version", "0.1.0");
    is("jax_version", "0.10.2");
    CHECK(!neuron_kernels_metadata(bundle, "nothing"));
    CHECK(neuron_kernels_simulated(bundle) == 1);
    CHECK(neuron_kernels_lnc(bundle) == 1);
}

// Numbers out of range and null pointers give an answer, and are not dereferenced.
static void test_bad_arguments(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    const kernel & k = kernels[0];
    for (int32_t number : { -1, INT32_MIN, INT32_MAX, static_cast<int32_t>(kernels.size()) }) {
        size_t size = 1;
        CHECK(!neuron_kernels_id(bundle, number));
        CHECK(!neuron_kernels_neff(bundle, number, &size) && size == 0);
        size = 1;
        CHECK(!neuron_kernels_key(bundle, number, &size) && size == 0);
        CHECK(!neuron_kernels_hlo_sha256(bundle, number));
        CHECK(neuron_kernels_neff_index(bundle, number) == NEURON_KERNELS_NOT_FOUND);
    }
    CHECK(neuron_kernels_neff(bundle, 0, nullptr) && neuron_kernels_key(bundle, 0, nullptr));
    CHECK(neuron_kernels_find(nullptr, "add", nullptr, k.inputs.data(), 2, &k.output, -1) == -1);
    CHECK(neuron_kernels_find(bundle, nullptr, nullptr, k.inputs.data(), 2, &k.output, -1) == -1);
    CHECK(neuron_kernels_find(bundle, "add", nullptr, nullptr, 2, &k.output, -1) == -1);
    CHECK(neuron_kernels_find(bundle, "add", nullptr, k.inputs.data(), 2, nullptr, -1) == -1);
    CHECK(neuron_kernels_find_id(bundle, nullptr) == -1 && neuron_kernels_find_id(nullptr, "add") == -1);
    CHECK(!neuron_kernels_metadata(bundle, nullptr) && !neuron_kernels_metadata(nullptr, "name"));
    CHECK(neuron_kernels_count(nullptr) == 0 && neuron_kernels_neff_count(nullptr) == 0);
    CHECK(!neuron_kernels_id(nullptr, 0) && !neuron_kernels_neff(nullptr, 0, nullptr));
    CHECK(!neuron_kernels_key(nullptr, 0, nullptr) && !neuron_kernels_hlo_sha256(nullptr, 0));
    CHECK(neuron_kernels_simulated(nullptr) == 0 && neuron_kernels_lnc(nullptr) == 0);
    neuron_kernels_close(nullptr);
}

static void test_set_dense() {
    const auto strides = [](int32_t type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                            std::vector<uint64_t> nb) {
        neuron_kernels_tensor t = {
            type, { ne0, ne1, ne2, ne3 },
             { 7,   7,   7,   7   }
        };
        const int result = neuron_kernels_set_dense(&t);
        CHECK_MSG(result == (nb.empty() ? -1 : 0), "type %d", type);
        CHECK_MSG(nb.empty() ? t.nb[0] == 7 && t.nb[3] == 7 : memcmp(t.nb, nb.data(), sizeof(t.nb)) == 0, "type %d",
                  type);
    };
    strides(0, 3, 5, 7, 9, { 4, 12, 60, 420 });
    strides(12, 512, 4, 1, 1, { 144, 288, 1152, 1152 });  // q4_K: 144 bytes for 256 elements
    strides(12, 100, 4, 1, 1, {});                        // no whole block
    strides(0, 3, 0, 1, 1, {});
    strides(0, 3, -5, 1, 1, {});
    strides(4, 32, 1, 1, 1, {});  // no such type
    strides(NEURON_KERNELS_ABSENT, 32, 1, 1, 1, {});
    strides(0, int64_t(1) << 40, int64_t(1) << 40, 1, 1, {});
    strides(24, int64_t(1) << 62, 1, 1, 2, {});
    CHECK(neuron_kernels_set_dense(nullptr) == -1);
}

static void test_finding_allocates_nothing(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    const std::string id     = test::kernel_id(3);
    const size_t      before = n_allocations;
    for (const kernel & k : kernels) {
        find(bundle, k);
        neuron_kernels_find(bundle, "nothing", k.op_params, k.inputs.data(), k.inputs.size(), &k.output, k.alias);
        neuron_kernels_find_id(bundle, id.c_str());
    }
    CHECK(n_allocations == before);
}

static void test_threads_find_at_once(const neuron_kernels * bundle, const std::vector<kernel> & kernels) {
    int                      wrong[4] = {};
    std::vector<std::thread> threads;
    for (int & count : wrong) {
        threads.emplace_back([&] {
            for (size_t i = 0; i < 20000; i++) {
                count += find(bundle, kernels[i % kernels.size()]) != static_cast<int32_t>(i % kernels.size());
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(wrong[0] + wrong[1] + wrong[2] + wrong[3] == 0);
}

static void test_a_neff_that_is_not_the_indexs_is_noticed(const std::string & bytes, size_t n_kernels) {
    std::string  damaged = bytes;
    const size_t last = damaged.find_last_not_of('\0');  // last byte of the last NEFF, which the last two kernels share
    char         message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle = nullptr;
    damaged[last] ^= 1;
    CHECK(neuron_kernels_open_memory(damaged.data(), damaged.size(), &bundle, nullptr, 0) == NEURON_KERNELS_OK);
    for (size_t i = 0; i < n_kernels; i++) {
        const bool                  good   = i + 2 < n_kernels;
        const neuron_kernels_status status = neuron_kernels_verify(bundle, (int32_t) i, message, sizeof(message));
        CHECK_MSG(status == (good ? NEURON_KERNELS_OK : NEURON_KERNELS_ERROR_CORRUPT), "kernel %zu: %s", i, message);
        CHECK_MSG(good ? !*message : strstr(message, "its NEFF is damaged: the SHA-256 of its") != nullptr, "%s",
                  message);
        CHECK(neuron_kernels_verify(bundle, (int32_t) i, nullptr, 0) == status);
        size_t       size;
        const void * neff = neuron_kernels_neff(bundle, (int32_t) i, &size);
        std::string  copy(size, '\0');
        CHECK(neuron_kernels_read(bundle, (int32_t) i, copy.data(), size, message, sizeof(message)) == status);
        CHECK(memcmp(copy.data(), neff, size) == 0);
        CHECK(neuron_kernels_read(bundle, (int32_t) i, copy.data(), size - 1, message, sizeof(message)) ==
              NEURON_KERNELS_ERROR_ARGUMENT);
    }
    CHECK(neuron_kernels_verify(bundle, (int32_t) n_kernels, message, sizeof(message)) ==
          NEURON_KERNELS_ERROR_ARGUMENT);
    CHECK(neuron_kernels_verify(nullptr, 0, message, sizeof(message)) == NEURON_KERNELS_ERROR_ARGUMENT);
    neuron_kernels_close(bundle);
}

// The examples of FIPS 180-4, and every length of the last block.
static void test_sha256() {
    CHECK(test::digest_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(test::digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(test::digest_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    std::string all;
    for (size_t size = 0; size < 200; size++) {
        all += test::digest_of(std::string(size, 'x'));
    }
    CHECK(test::digest_of(all) == "f61ffcc417e1f0e59eba2da7fa32fbe05b64e478b68c6bacf990455f00248b98");
}

// A graph kernel is found by its words and by no others, in a bundle that also has op kernels.
static void test_graphs_are_found_by_their_words() {
    std::vector<kernel> kernels = test::sample_kernels();
    const size_t        first   = kernels.size();
    for (const kernel & k : test::sample_graphs()) {
        kernels.push_back(k);
    }
    const std::string bytes = test::make_pack(kernels).bytes();
    neuron_kernels *  bundle;
    CHECK(neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, nullptr, 0) == NEURON_KERNELS_OK);
    for (size_t i = 0; i < kernels.size(); i++) {
        std::vector<uint64_t> words = test::key_words(kernels[i]);
        CHECK(neuron_kernels_find_words(bundle, words.data(), words.size()) == static_cast<int32_t>(i));
        for (size_t w = 0; i >= first && w < words.size(); w++) {
            words[w]++;
            CHECK(neuron_kernels_find_words(bundle, words.data(), words.size()) == NEURON_KERNELS_NOT_FOUND);
            words[w]--;
        }
        CHECK(neuron_kernels_find_words(bundle, words.data(), words.size() - 1) == NEURON_KERNELS_NOT_FOUND);
    }
    CHECK(neuron_kernels_find_words(bundle, nullptr, 3) == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_words(nullptr, test::key_words(kernels[0]).data(), 3) == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_words(bundle, test::key_words(kernels[0]).data(), 0) == NEURON_KERNELS_NOT_FOUND);
    neuron_kernels_close(bundle);
}

// A kernel without an op is found by its name and by no other, in a bundle that also has op kernels.
static void test_kernels_are_found_by_their_names() {
    std::vector<kernel> kernels = test::sample_kernels();
    const int32_t       first   = static_cast<int32_t>(kernels.size());
    const char *        names[] = { "cumsum", "Cumsum", "flash_fwd_512" };
    for (const char * name : names) {
        kernel k;
        k.words.resize(nk::SOURCE_WORDS);
        nk::make_source_key(name, k.words.data());
        kernels.push_back(k);
    }
    const std::string bytes = test::make_pack(kernels).bytes();
    neuron_kernels *  bundle;
    CHECK(neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, nullptr, 0) == NEURON_KERNELS_OK);
    for (int32_t i = 0; i < 3; i++) {
        CHECK(neuron_kernels_find_name(bundle, names[i]) == first + i);
    }
    for (const char * other : { "", "cumsu", "cumsum ", "CUMSUM", "source", "mul_mat" }) {
        CHECK(neuron_kernels_find_name(bundle, other) == NEURON_KERNELS_NOT_FOUND);
    }
    CHECK(neuron_kernels_find_name(bundle, nullptr) == NEURON_KERNELS_NOT_FOUND);
    CHECK(neuron_kernels_find_name(nullptr, names[0]) == NEURON_KERNELS_NOT_FOUND);
    neuron_kernels_close(bundle);
}

int main() {
    const std::vector<kernel> kernels = test::sample_kernels();
    const std::string         bytes   = test::make_pack(kernels).bytes();
    char                      message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels *          bundle = nullptr;
    if (neuron_kernels_open_memory(bytes.data(), bytes.size(), &bundle, message, sizeof(message)) !=
        NEURON_KERNELS_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    test_every_kernel_is_found(bundle, kernels);
    test_any_difference_is_a_miss(bundle, kernels);
    test_meaningless_strides_are_ignored(bundle, kernels);
    test_names_and_absent_inputs(bundle, kernels);
    test_null_op_params_are_zeros(bundle, kernels);
    test_graphs_are_found_by_their_words();
    test_kernels_are_found_by_their_names();
    test_ids(bundle, kernels.size());
    test_metadata(bundle);
    test_bad_arguments(bundle, kernels);
    test_set_dense();
    test_finding_allocates_nothing(bundle, kernels);
    test_threads_find_at_once(bundle, kernels);
    test_a_neff_that_is_not_the_indexs_is_noticed(bytes, kernels.size());
    test_sha256();
    neuron_kernels_close(bundle);
    CHECK(neuron_kernels_api_version() == NEURON_KERNELS_API_VERSION);
    return test_result();
}
