// Weights in layouts: writes to buffers of their types, reads, and computation.
//
//     layouts <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>:<type>[:<layout>]...
//
// Without a layout, quantized types have the layout planes, and others the layout transposed.
//
// The output is one line per scenario, "<scenario>: ok" or "<scenario>: <the mistake>". `bytes` prints a tensor's bytes
// in ggml's order and in device memory; tests/ggml_neuron compares them with kernelgen's bytes.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"
#include "values.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

static ggml_backend_dev_t neuron;
static ggml_backend_dev_t cpu;

// The scenario's layout.
static std::string layout;

static std::mt19937 generator(7);

static uint32_t below(size_t n) {
    return (uint32_t) (generator() % n);
}

// Returns the buffer type for weights in the layout, or NULL when the device has none.
static ggml_backend_buffer_type_t extra_buft() {
    const auto get_extra_bufts = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(neuron), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * buft = get_extra_bufts(neuron); *buft; buft++) {
        const std::string name = ggml_backend_buft_name(*buft);
        if (name == ggml_backend_dev_name(neuron) + std::string("_") + layout) {
            return *buft;
        }
    }
    return nullptr;
}

static ggml_backend_buffer_type_t own_buft() {
    return ggml_backend_dev_buffer_type(neuron);
}

// Tensors in a buffer of some type.
struct tensors {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    tensors() {
        ggml_init_params params = { ggml_tensor_overhead() * 32 + 4 * ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
    }

    ggml_context * get() const { return ctx.get(); }

    void allocate(ggml_backend_buffer_type_t buft) {
        check(buft != nullptr, "the device has no such buffer type");
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        check(buffer != nullptr, "no memory");
    }
};

// A weight of two matrices whose rows have several blocks.
static ggml_tensor * weight(const tensors & t, ggml_type type, int64_t rows = 5) {
    return ggml_new_tensor_3d(t.get(), type, std::max<int64_t>(2 * ggml_blck_size(type), 96), rows, 2);
}

// Returns whether the layout has tiles, each with a scale and elements of 8 bits.
static bool in_tiles() {
    return layout == "f8_e4m3_128x128";
}

// Returns whether the buffer keeps the original separately.
static bool is_apart() {
    return layout == "bf16" || in_tiles();
}

static std::vector<uint8_t> noise(size_t n) {
    std::vector<uint8_t> bytes(n);
    for (uint8_t & byte : bytes) {
        byte = (uint8_t) generator();
    }
    return bytes;
}

static std::vector<uint8_t> contents(const ggml_tensor * t) {
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
    return bytes;
}

// Returns a tensor's bytes in device memory, read through an I8 tensor, which has no layout.
static std::vector<uint8_t> stored(const ggml_tensor * t) {
    tensors       other;
    ggml_tensor * raw =
        ggml_new_tensor_1d(other.get(), GGML_TYPE_I8, (int64_t) ggml_backend_buffer_get_alloc_size(t->buffer, t));
    raw->data   = t->data;
    raw->buffer = t->buffer;
    return contents(raw);
}

// Replaces the first matrix of a weight's bytes by numbers that grow from row to row.
static void quantize_first(const ggml_tensor * w, std::vector<uint8_t> & data) {
    const auto               columns = (size_t) w->ne[0];
    const std::vector<float> importance(columns, 1.0f);
    std::vector<float>       values(columns * (size_t) w->ne[1]);
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = std::sin((float) i * 0.37f) * (1.0f + 0.01f * (float) (i / columns));
    }
    ggml_quantize_chunk(w->type, values.data(), data.data(), 0, w->ne[1], w->ne[0], importance.data());
}

static void bytes(ggml_type type) {
    tensors       t;
    ggml_tensor * w = in_tiles() ? weight(t, type, 131) : weight(t, type);  // more rows than in a tile
    t.allocate(extra_buft());
    std::vector<uint8_t> given = noise(ggml_nbytes(w));
    if (in_tiles()) {
        quantize_first(w, given);  // with noise all scales are NaN
    }
    ggml_backend_tensor_set(w, given.data(), 0, given.size());
    check(contents(w) == given, "what is read back is not what was written");
    const std::vector<uint8_t> kept = stored(w);
    check(kept != given, "the bytes are in ggml's order");
    for (const auto & all : { given, kept }) {
        for (const uint8_t byte : all) {
            printf("%02x", byte);
        }
        printf("\n");
    }
}

// Sets and reads ranges with any beginning and end, also row by row, and compares with a copy in host memory.
static void parts(ggml_type type) {
    tensors       t;
    ggml_tensor * w      = weight(t, type);
    ggml_tensor * before = ggml_new_tensor_1d(t.get(), GGML_TYPE_F32, 64);
    ggml_tensor * after  = weight(t, type);
    t.allocate(extra_buft());
    std::vector<uint8_t>       copy = noise(ggml_nbytes(w));
    const std::vector<uint8_t> rest = noise(ggml_nbytes(after));
    const uint8_t clear = is_apart() ? 0 : 0x5a;  // a buffer with separate originals can be cleared only with 0
    ggml_backend_tensor_set(w, copy.data(), 0, copy.size());
    ggml_backend_buffer_clear(t.buffer.get(), clear);
    check(contents(w) == std::vector<uint8_t>(copy.size(), clear), "clear");
    if (clear == 0) {
        check(stored(w) == std::vector<uint8_t>(stored(w).size()), "zeros are not stored as zeros");
    }
    ggml_backend_tensor_set(after, rest.data(), 0, rest.size());
    ggml_backend_tensor_set(w, copy.data(), 0, copy.size());
    for (int i = 0; i < 200; i++) {
        const size_t offset = below(copy.size());
        const size_t size   = 1 + below(std::min<size_t>(copy.size() - offset, i % 2 ? copy.size() : 40));
        if (i % 3 == 0) {
            const uint8_t value = (uint8_t) i;
            ggml_backend_tensor_memset(w, value, offset, size);
            std::fill_n(copy.begin() + (std::ptrdiff_t) offset, size, value);
        } else {
            const std::vector<uint8_t> part = noise(size);
            ggml_backend_tensor_set(w, part.data(), offset, size);
            std::copy(part.begin(), part.end(), copy.begin() + (std::ptrdiff_t) offset);
        }
        const size_t         from = below(copy.size());
        std::vector<uint8_t> part(1 + below(copy.size() - from));
        ggml_backend_tensor_get(w, part.data(), from, part.size());
        check(memcmp(part.data(), copy.data() + from, part.size()) == 0, "a part is not what was written");
    }
    const size_t               half = w->nb[1] / 2;
    const std::vector<uint8_t> rows = noise(half * 5);
    ggml_backend_tensor_set_2d(w, rows.data(), 3, half, 5, w->nb[1], half);  // a part of each row
    for (size_t row = 0; row < 5; row++) {
        memcpy(copy.data() + 3 + row * w->nb[1], rows.data() + row * half, half);
    }
    check(contents(w) == copy, "the whole is not what was written");
    check(contents(after) == rest, "another tensor has changed");
    check(contents(before) == std::vector<uint8_t>(256, clear), "a tensor without a layout has changed");
    ggml_backend_tensor_set(after, copy.data(), 0, copy.size());
    check(stored(w) == stored(after), "what was written in parts is not stored as what is written whole");
}

// Ends the program if the original is kept separately.
static void clear(ggml_type type) {
    tensors t;
    weight(t, type);
    t.allocate(extra_buft());
    ggml_backend_buffer_clear(t.buffer.get(), 1);
}

// Copies to and from ggml's order, on the device and in host memory, and reads views.
static void copies(ggml_type type) {
    tensors       packed;
    tensors       again;
    tensors       plain;
    tensors       host;
    ggml_tensor * w     = weight(packed, type);
    ggml_tensor * v     = ggml_view_2d(packed.get(), w, w->ne[0], 3, w->nb[1], w->nb[2] + w->nb[1]);
    ggml_tensor * other = weight(again, type);
    ggml_tensor * own   = weight(plain, type);
    ggml_tensor * far   = weight(host, type);
    packed.allocate(extra_buft());
    again.allocate(extra_buft());
    plain.allocate(own_buft());
    host.allocate(ggml_backend_cpu_buffer_type());
    const std::vector<uint8_t> given = noise(ggml_nbytes(w));
    ggml_backend_tensor_set(far, given.data(), 0, given.size());
    ggml_backend_tensor_copy(far, w);
    check(contents(w) == given, "from host memory");
    ggml_backend_tensor_copy(w, own);
    check(contents(own) == given && stored(own) == given, "to the device's own buffer type");
    ggml_backend_tensor_copy(own, other);
    check(contents(other) == given && stored(other) == stored(w), "from the device's own buffer type");
    const auto begin = given.begin() + (std::ptrdiff_t) (w->nb[2] + w->nb[1]);
    check(contents(v) == std::vector<uint8_t>(begin, begin + (std::ptrdiff_t) ggml_nbytes(v)), "a view");
}

// Prints a hash of the device memory of a weight that is large enough for several threads.
static void digest(ggml_type type) {
    tensors       t;
    ggml_tensor * w = ggml_new_tensor_3d(t.get(), type, 1024, 1131, 2);
    t.allocate(extra_buft());
    const std::vector<uint8_t> given = noise(ggml_nbytes(w));
    ggml_backend_tensor_set(w, given.data(), 0, given.size());
    check(contents(w) == given, "what is read back is not what was written");
    uint64_t sum = 14695981039346656037u;  // FNV-1a
    for (const uint8_t byte : stored(w)) {
        sum = (sum ^ byte) * 1099511628211u;
    }
    printf("%016llx\n", (unsigned long long) sum);
}

//
// weights in files
//

// A file that is mapped as a program maps a model.
class mapped_file {
  public:
    static constexpr size_t OFFSET = 4096 + 96;  // of the weight: not at the beginning of a page, as most are

    mapped_file(const std::vector<uint8_t> & weight,
                const char *                 magic  = "GGUF",
                int                          flags  = MAP_SHARED,
                int                          access = PROT_READ) : size(OFFSET + weight.size()) {
        const int file = mkstemp(path);
        check(file >= 0 && pwrite(file, magic, 4, 0) == 4, "no file");
        check(pwrite(file, weight.data(), weight.size(), OFFSET) == (ssize_t) weight.size(), "the file is not written");
        void * mapped = mmap(nullptr, size, access, flags, file, 0);
        close(file);
        check(mapped != MAP_FAILED, "the file is not mapped");
        begin = (uint8_t *) mapped;
    }

    ~mapped_file() {
        munmap(begin, size);
        unlink(path);
    }

    mapped_file(const mapped_file &) = delete;

    const uint8_t * weight() const { return begin + OFFSET; }

    // Overwrites the weight; the file's modification time is then some seconds later.
    void change() const {
        const int                  file = open(path, O_WRONLY);
        const std::vector<uint8_t> other(100, 1);
        struct stat                status;
        check(file >= 0 && pwrite(file, other.data(), other.size(), OFFSET) == 100 && fstat(file, &status) == 0,
              "the file is not changed");
        const struct timespec times[] = {
            status.st_atim, { status.st_mtim.tv_sec + 5, 0 }
        };
        check(futimens(file, times) == 0, "the file has no other time");
        close(file);
    }

    // Replaces the file by another one.
    void replace() const {
        const mapped_file other(std::vector<uint8_t>(size - OFFSET, 7));
        check(rename(other.path, path) == 0, "the file is not replaced");
    }

  private:
    char      path[32] = "/tmp/layouts-XXXXXX";
    size_t    size;
    uint8_t * begin;
};

// A weight that was set from a mapping outlives the file, and can be changed like any other weight.
static void mapped(ggml_type type) {
    tensors       t;
    ggml_tensor * w     = weight(t, type);
    ggml_tensor * other = weight(t, type);
    t.allocate(extra_buft());
    std::vector<uint8_t>       copy = noise(ggml_nbytes(w));
    const std::vector<uint8_t> rest = noise(ggml_nbytes(w));
    const auto                 same = [&](const char * when) {
        check(contents(w) == copy, std::string("another weight, ") + when);
        tensors       from_copy;
        ggml_tensor * v = weight(from_copy, type);
        from_copy.allocate(extra_buft());
        ggml_backend_tensor_set(v, copy.data(), 0, copy.size());
        check(stored(v) == stored(w), std::string("it is not stored as from a copy, ") + when);
        check(contents(other) == rest, std::string("the other one is changed, ") + when);
    };
    {
        const mapped_file file(copy);
        const mapped_file second(rest);
        ggml_backend_tensor_set(w, file.weight(), 0, copy.size());
        ggml_backend_tensor_set(other, second.weight(), 0, rest.size());
        same("as it was set");
        file.replace();
        same("when another file is in its place");
    }
    same("when the file is gone");
    std::vector<uint8_t> part(copy.size() / 3);
    ggml_backend_tensor_get(w, part.data(), 77, part.size());
    check(memcmp(part.data(), copy.data() + 77, part.size()) == 0, "a part differs");
    part = noise(part.size());
    ggml_backend_tensor_set(w, part.data(), 33, part.size());
    std::copy(part.begin(), part.end(), copy.begin() + 33);
    same("when a part was set");
    copy = noise(copy.size());
    ggml_backend_tensor_set(w, mapped_file(copy).weight(), 0, copy.size());
    same("when it was set again");
    ggml_backend_buffer_clear(t.buffer.get(), 0);
    check(contents(w) == std::vector<uint8_t>(copy.size()) && contents(other) == contents(w), "clear");
}

// Returns the KiB of the process's memory that are not in a file. Returns free memory to the system first.
static long memory_used() {
    malloc_trim(0);
    FILE * status = fopen("/proc/self/status", "r");
    check(status != nullptr, "no /proc/self/status");
    char line[200];
    long kib = -1;
    while (kib < 0 && fgets(line, sizeof(line), status)) {
        sscanf(line, "RssAnon: %ld", &kib);
    }
    fclose(status);
    check(kib >= 0, "the system does not say what memory is used");
    return kib;
}

// Returns the KiB that a weight in a layout takes, including the simulator's device memory.
static long memory_taken(ggml_type type, const uint8_t * data, size_t size) {
    const long    before = memory_used();
    tensors       t;
    ggml_tensor * w = ggml_new_tensor_2d(t.get(), type, 4096, 4096);
    t.allocate(extra_buft());
    ggml_backend_tensor_set(w, data, 0, size);
    std::vector<uint8_t> begin(100);
    ggml_backend_tensor_get(w, begin.data(), 0, begin.size());
    check(memcmp(begin.data(), data, begin.size()) == 0, "what is read back is not what was written");
    return memory_used() - before;
}

// A weight in a file is not copied, unless the file can change unnoticed.
static void memory(ggml_type type) {
    const std::vector<uint8_t> data  = noise(ggml_row_size(type, 4096) * 4096);
    const auto                 size  = (long) (data.size() >> 10);
    const long                 slack = size / 10;
    memory_taken(type, data.data(), data.size());  // the stacks of threads stay allocated
    const long copied  = memory_taken(type, data.data(), data.size());
    const long in_file = memory_taken(type, mapped_file(data).weight(), data.size());
    fprintf(stderr, "KiB of a weight of %ld: %ld from memory, %ld from a model's file\n", size, copied, in_file);
    check(std::labs(copied - in_file - size) < slack, "from a file it takes as much");
    const mapped_file others[] = {
        { data, "GGML" },
        { data, "GGUF", MAP_PRIVATE },
        { data, "GGUF", MAP_SHARED, PROT_READ | PROT_WRITE },
    };
    for (const mapped_file & other : others) {
        const long taken = memory_taken(type, other.weight(), data.size());
        check(std::labs(copied - taken) < slack, "a weight that may change is not copied");
    }
}

// Ends the program.
static void changed(ggml_type type) {
    tensors       t;
    ggml_tensor * w = weight(t, type);
    t.allocate(extra_buft());
    const mapped_file file(noise(ggml_nbytes(w)));
    ggml_backend_tensor_set(w, file.weight(), 0, ggml_nbytes(w));
    file.change();
    contents(w);
}

//
// weights of models
//

// A model in the file that LAYOUTS_MODEL names, mapped as llama.cpp maps it.
class mapped_model {
  public:
    mapped_model() {
        const char *     path   = getenv("LAYOUTS_MODEL");
        ggml_context *   ctx    = nullptr;
        gguf_init_params params = { true, &ctx };
        gguf.reset(gguf_init_from_file(path ? path : "", params));
        check(gguf != nullptr, "LAYOUTS_MODEL is not a model");
        described.reset(ctx);
        const int file = open(path, O_RDONLY);
        size           = (size_t) lseek(file, 0, SEEK_END);
        void * mapped  = mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        check(mapped != MAP_FAILED, "the model is not mapped");
        begin = (uint8_t *) mapped;
    }

    ~mapped_model() { munmap(begin, size); }

    mapped_model(const mapped_model &) = delete;

    // Returns tensors, without memory, in the shapes of the model's tensors of a type.
    std::vector<ggml_tensor *> tensors_of(ggml_type type, ggml_context * ctx) const {
        std::vector<ggml_tensor *> found;
        for (ggml_tensor * t = ggml_get_first_tensor(described.get()); t;
             t               = ggml_get_next_tensor(described.get(), t)) {
            if (t->type == type) {
                found.push_back(ggml_set_name(ggml_dup_tensor(ctx, t), t->name));
            }
        }
        check(!found.empty(), "the model has no tensor of the type");
        return found;
    }

    const uint8_t * data(const ggml_tensor * t) const {
        return begin + gguf_get_data_offset(gguf.get()) +
               gguf_get_tensor_offset(gguf.get(), gguf_find_tensor(gguf.get(), t->name));
    }

  private:
    gguf_context_ptr gguf;
    ggml_context_ptr described;
    size_t           size;
    uint8_t *        begin;
};

// Loads a model's tensors of a type, and prints a line for each with its device memory.
static void model(ggml_type type) {
    const mapped_model               file;
    tensors                          t;
    const std::vector<ggml_tensor *> weights = file.tensors_of(type, t.get());
    t.allocate(extra_buft());
    for (const ggml_tensor * w : weights) {
        ggml_backend_tensor_set((ggml_tensor *) w, file.data(w), 0, ggml_nbytes(w));
    }
    for (const ggml_tensor * w : weights) {
        check(memcmp(contents(w).data(), file.data(w), ggml_nbytes(w)) == 0, "what is read back is not the model's");
        for (const uint8_t byte : stored(w)) {
            printf("%02x", byte);
        }
        printf("\n");
    }
}

//
// products
//

struct product {
    tensors       weights;
    tensors       others;
    ggml_tensor * w;
    ggml_tensor * x;
    ggml_tensor * ids = nullptr;
    ggml_tensor * y;
    ggml_tensor * result;

    product(ggml_type type, bool experts, bool grouped) {
        w = experts ? ggml_new_tensor_3d(weights.get(), type, 512, 24, 4)
                    : ggml_new_tensor_2d(weights.get(), type, 512, 24);
        if (experts) {
            x   = ggml_new_tensor_3d(others.get(), GGML_TYPE_F32, 512, 1, 3);
            ids = ggml_new_tensor_2d(others.get(), GGML_TYPE_I32, 2, 3);
            y   = ggml_mul_mat_id(others.get(), w, x, ids);
        } else {
            x = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, 512, 3);
            y = ggml_mul_mat(others.get(), w, x);
        }
        result = grouped ? ggml_relu(others.get(), y) : y;
    }

    void fill() const {
        std::vector<float> values((size_t) ggml_nelements(w));
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = std::sin((float) i * 0.37f);
        }
        std::vector<uint8_t> data(ggml_nbytes(w));
        ggml_quantize_chunk(w->type, values.data(), data.data(), 0, ggml_nrows(w), w->ne[0], nullptr);
        ggml_backend_tensor_set(w, data.data(), 0, data.size());
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
        if (ids) {
            const int32_t chosen[] = { 3, 0, 1, 3, 2, 1 };
            ggml_backend_tensor_set(ids, chosen, 0, sizeof(chosen));
        }
    }
};

// Returns the product, computed by a device with the weight in a buffer of a type.
static std::vector<float> computed(ggml_backend_dev_t         dev,
                                   ggml_backend_buffer_type_t buft,
                                   ggml_type                  type,
                                   bool                       experts,
                                   bool                       grouped = false) {
    product p(type, experts, grouped);
    p.weights.allocate(buft);
    p.others.allocate(ggml_backend_dev_buffer_type(dev));
    p.fill();
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    ggml_cgraph *    graph = ggml_new_graph(p.others.get());
    ggml_build_forward_expand(graph, p.result);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        check(ggml_backend_dev_supports_op(dev, ggml_graph_node(graph, i)), "the device refuses a node");
    }
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    return read(p.result);
}

static double error_of(const std::vector<float> & have, const std::vector<float> & wanted) {
    double error = 0;
    double size  = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        error += std::pow((double) have[i] - wanted[i], 2);
        size += std::pow((double) wanted[i], 2);
    }
    return error / size;
}

// The product is the same with and without the layout, up to the layout's rounding, and near the CPU's.
static void product_of(ggml_type type, bool experts, bool grouped) {
    const std::vector<float> plain     = computed(neuron, own_buft(), type, experts, grouped);
    const std::vector<float> in_layout = computed(neuron, extra_buft(), type, experts, grouped);
    const std::vector<float> wanted    = computed(cpu, ggml_backend_dev_buffer_type(cpu), type, experts, grouped);
    const double             error     = error_of(in_layout, wanted);
    const double             limit     = in_tiles() ? 1.5e-3 : 5e-4;  // e4m3's rounding gives 7e-4
    check(error < limit, "the result's error is " + std::to_string(error));
    if (layout == "planes") {
        check(in_layout == plain, "the result is not the one without the layout");
    } else {
        check(error_of(in_layout, plain) < (in_tiles()         ? limit
                                            : layout == "bf16" ? 2e-5
                                                               : 1e-10),
              "the result is far from the one without the layout");
    }
}

// The product with some rows of a weight (a view that begins within it) is a part of the product with the whole weight.
static void rows(ggml_type type) {
    product p(type, false, false);
    p.weights.allocate(extra_buft());
    ggml_tensor * few    = ggml_view_2d(p.others.get(), p.w, 512, 7, p.w->nb[1], 2 * p.w->nb[1]);
    ggml_tensor * result = ggml_mul_mat(p.others.get(), few, p.x);
    p.others.allocate(own_buft());
    p.fill();
    check(ggml_backend_dev_supports_op(neuron, result), "the device refuses rows");
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_cgraph *    graph = ggml_new_graph(p.others.get());
    ggml_build_forward_expand(graph, result);
    ggml_build_forward_expand(graph, p.y);
    check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    const std::vector<float> part  = read(result);
    const std::vector<float> whole = read(p.y);
    for (size_t row = 0; row < 3; row++) {
        for (size_t i = 0; i < 7; i++) {
            check(std::fabs(part[row * 7 + i] - whole[row * 24 + 2 + i]) < 1e-3f, "another result");
        }
    }
}

// Requests for a weight before it has memory, as llama.cpp makes them. The device's own buffer type refuses a weight
// that a kernel requires in a layout, and the layout's type takes it; for weights of other shapes it is the reverse.
static void probes(ggml_type type) {
    for (const bool known : { true, false }) {
        tensors                 t;
        ggml_tensor *           w = ggml_new_tensor_2d(t.get(), type, 512, known ? 24 : 40);
        ggml_tensor *           y = ggml_mul_mat(t.get(), w, ggml_new_tensor_2d(t.get(), GGML_TYPE_F32, 512, 512));
        ggml_backend_buffer_ptr own(ggml_backend_buft_alloc_buffer(own_buft(), 0));
        ggml_backend_buffer_ptr in_layout(ggml_backend_buft_alloc_buffer(extra_buft(), 0));
        w->buffer         = own.get();
        const bool plain  = ggml_backend_dev_supports_op(neuron, y);
        w->buffer         = in_layout.get();
        const bool layout = ggml_backend_dev_supports_op(neuron, y);
        w->buffer         = nullptr;
        check(plain != known, known ? "its own buffer type takes it" : "its own buffer type refuses it");
        check(layout == known, known ? "the layout's buffer type refuses it" : "the layout's buffer type takes it");
    }
}

// With GGML_NEURON_REPACK=0 the device has a single buffer type, and takes every weight in it that it takes without
// layouts.
static void off(ggml_type type) {
    check(extra_buft() == nullptr, "there is a buffer type for layouts");
    tensors                 t;
    ggml_tensor *           w = ggml_new_tensor_2d(t.get(), type, 512, 24);
    ggml_tensor *           y = ggml_mul_mat(t.get(), w, ggml_new_tensor_2d(t.get(), GGML_TYPE_F32, 512, 512));
    ggml_backend_buffer_ptr own(ggml_backend_buft_alloc_buffer(own_buft(), 0));
    w->buffer = own.get();
    check(ggml_backend_dev_supports_op(neuron, y), "its own buffer type refuses it");
    w->buffer = nullptr;
    check(!computed(neuron, own_buft(), type, false).empty(), "no result");
}

// A kernel for one layout is not found for a weight in another.
static void other_layout(ggml_type type) {
    for (const auto buft : { own_buft(), extra_buft() }) {
        product p(type, false, false);
        p.weights.allocate(buft);
        p.others.allocate(own_buft());
        const bool wanted = buft == extra_buft();
        check(ggml_backend_dev_supports_op(neuron, p.y) == wanted,
              wanted ? "refused in its layout" : "accepted in ggml's");
    }
}

// The device refuses ops without a kernel for the layout, also on views of rows and of parts of rows. The CPU computes
// them correctly, both with ggml's scheduler, which copies the weight, and when the backend must compute them.
static void refused(ggml_type type) {
    tensors       weights;
    tensors       others;
    ggml_tensor * w       = ggml_new_tensor_2d(weights.get(), type, 512, 24);
    ggml_tensor * rows    = ggml_new_tensor_1d(others.get(), GGML_TYPE_I32, 3);
    ggml_tensor * x       = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, 256, 3);
    ggml_tensor * y       = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, 512, 3);
    ggml_tensor * some    = ggml_view_2d(others.get(), w, 256, 24, w->nb[1], 0);
    ggml_tensor * few     = ggml_view_2d(others.get(), w, 512, 7, w->nb[1], 2 * w->nb[1]);
    ggml_tensor * nodes[] = {
        ggml_get_rows(others.get(), w, rows),
        ggml_mul_mat(others.get(), some, x),
        ggml_mul_mat(others.get(), few, y),
    };
    weights.allocate(extra_buft());
    others.allocate(own_buft());
    const auto values = [](ggml_tensor * t) {
        std::vector<float> numbers((size_t) ggml_nelements(t));
        for (size_t i = 0; i < numbers.size(); i++) {
            numbers[i] = std::cos((float) i * 0.11f);
        }
        return numbers;
    };
    std::vector<uint8_t> data(ggml_nbytes(w));
    ggml_quantize_chunk(type, values(w).data(), data.data(), 0, 24, 512, nullptr);
    ggml_backend_tensor_set(w, data.data(), 0, data.size());
    const int32_t numbers[] = { 20, 3, 11 };
    ggml_backend_tensor_set(rows, numbers, 0, sizeof(numbers));
    for (ggml_tensor * t : { x, y }) {
        ggml_backend_tensor_set(t, values(t).data(), 0, ggml_nbytes(t));
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    for (ggml_tensor * node : nodes) {
        const std::string what = ggml_op_desc(node);
        check(!ggml_backend_dev_supports_op(neuron, node), what + " is accepted");
        ggml_cgraph * graph = ggml_new_graph(others.get());
        ggml_build_forward_expand(graph, node);
        check(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, what + ": graph_compute failed");
    }
    // the same in host memory
    tensors       host;
    ggml_tensor * w2     = ggml_new_tensor_2d(host.get(), type, 512, 24);
    ggml_tensor * rows2  = ggml_new_tensor_1d(host.get(), GGML_TYPE_I32, 3);
    ggml_tensor * x2     = ggml_new_tensor_2d(host.get(), GGML_TYPE_F32, 256, 3);
    ggml_tensor * y2     = ggml_new_tensor_2d(host.get(), GGML_TYPE_F32, 512, 3);
    ggml_tensor * same[] = {
        ggml_get_rows(host.get(), w2, rows2),
        ggml_mul_mat(host.get(), ggml_view_2d(host.get(), w2, 256, 24, w2->nb[1], 0), x2),
        ggml_mul_mat(host.get(), ggml_view_2d(host.get(), w2, 512, 7, w2->nb[1], 2 * w2->nb[1]), y2),
    };
    host.allocate(ggml_backend_dev_buffer_type(cpu));
    const std::pair<ggml_tensor *, ggml_tensor *> copied[] = {
        { w,    w2    },
        { rows, rows2 },
        { x,    x2    },
        { y,    y2    }
    };
    for (const auto & [from, to] : copied) {
        ggml_backend_tensor_copy(from, to);
    }
    ggml_backend_ptr reference(ggml_backend_dev_init(cpu, nullptr));
    for (size_t i = 0; i < 3; i++) {
        ggml_cgraph * graph = ggml_new_graph(host.get());
        ggml_build_forward_expand(graph, same[i]);
        ggml_backend_graph_compute(reference.get(), graph);
        check(read(nodes[i]) == read(same[i]), std::string(ggml_op_desc(nodes[i])) + ": another result");
    }
}

static ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        if (ggml_type_name((ggml_type) i) && name == ggml_type_name((ggml_type) i)) {
            return (ggml_type) i;
        }
    }
    fail("no type " + name);
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void(ggml_type)>> scenarios = {
        { "bytes",        bytes                                            },
        { "parts",        parts                                            },
        { "clear",        clear                                            },
        { "copies",       copies                                           },
        { "digest",       digest                                           },
        { "mapped",       mapped                                           },
        { "memory",       memory                                           },
        { "changed",      changed                                          },
        { "model",        model                                            },
        { "product",      [](ggml_type t) { product_of(t, false, false); } },
        { "experts",      [](ggml_type t) { product_of(t, true, false); }  },
        { "group",        [](ggml_type t) { product_of(t, false, true); }  },
        { "rows",         rows                                             },
        { "probes",       probes                                           },
        { "off",          off                                              },
        { "other-layout", other_layout                                     },
        { "refused",      refused                                          },
    };
    if (argc < 4) {
        fprintf(
            stderr,
            "usage: layouts <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>:<type>[:<layout>]...\n");
        return 2;
    }
    ggml_backend_load_all_from_path(argv[2]);
    cpu                        = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t neurons = ggml_backend_load(argv[1]);
    if (!neurons || !cpu || ggml_backend_reg_dev_count(neurons) == 0) {
        fprintf(stderr, "layouts: no device\n");
        return 2;
    }
    neuron     = ggml_backend_reg_dev_get(neurons, 0);
    int result = 0;
    for (int i = 3; i < argc; i++) {
        std::stringstream words(argv[i]);
        std::string       scenario;
        std::string       type;
        layout.clear();
        std::getline(std::getline(std::getline(words, scenario, ':'), type, ':'), layout);
        const auto found = scenarios.find(scenario);
        if (found == scenarios.end() || type.empty()) {
            fprintf(stderr, "layouts: no scenario %s\n", argv[i]);
            return 2;
        }
        try {
            if (layout.empty()) {
                layout = ggml_is_quantized(type_of(type)) ? "planes" : "transposed";
            }
            found->second(type_of(type));
            printf("%s: ok\n", argv[i]);
        } catch (const std::exception & error) {
            printf("%s: %s\n", argv[i], error.what());
            result = 1;
        }
        fflush(stdout);
    }
    return result;
}
