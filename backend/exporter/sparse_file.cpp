#include "sparse_file.h"

#include "gguf.h"
#include "llama.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace {

// Headers of real models have some MiB, mostly vocabulary.
constexpr size_t MAX_HEADER = (size_t) 1 << 30;
constexpr int    MAX_FILES  = 1000;

struct free_gguf {
    void operator()(gguf_context * c) const { gguf_free(c); }
};

using gguf_ptr = std::unique_ptr<gguf_context, free_gguf>;

gguf_ptr read_header(const std::string & path) {
    return gguf_ptr(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/true, /*.ctx =*/nullptr }));
}

std::runtime_error failure(const std::string & path) {
    return std::runtime_error(path + ": " + strerror(errno));
}

// Copies `size` bytes from the beginning of one file to another.
void copy(int from, int to, size_t size, const std::string & path) {
    std::vector<char> buffer(1 << 20);
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(from, buffer.data(), std::min(buffer.size(), size - done), (off_t) done);
        if (got < 0) {
            throw failure(path);
        }
        if (got == 0) {
            throw std::runtime_error(path + ": the header is cut off");
        }
        if (pwrite(to, buffer.data(), (size_t) got, (off_t) done) != got) {
            throw failure(path);
        }
        done += (size_t) got;
    }
}

}  // namespace

// A file in memory, which the system removes at the end of the process.
struct memory_file {
    int fd;

    explicit memory_file(const std::string & of) : fd(memfd_create("header", MFD_CLOEXEC)) {
        if (fd < 0) {
            throw failure(of);
        }
    }

    ~memory_file() { close(fd); }

    memory_file(const memory_file &)             = delete;
    memory_file & operator=(const memory_file &) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd); }

    // The added bytes are a hole.
    void resize(uint64_t size, const std::string & of) const {
        if (size > (uint64_t) INT64_MAX || ftruncate(fd, (off_t) size) != 0) {
            throw std::runtime_error(of + ": tensors of " + std::to_string(size) + " bytes");
        }
    }
};

sparse_file::sparse_file(const std::string & path, bool with_numbers) {
    // do not wait for the writer of a pipe
    const int source = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (source < 0) {
        throw failure(path);
    }

    struct close_file {
        int fd;

        ~close_file() { close(fd); }
    } closed{ source };

    struct stat status;
    if (fstat(source, &status) != 0) {
        throw failure(path);
    }
    char magic[4] = "";
    if (!S_ISREG(status.st_mode) || pread(source, magic, 4, 0) != 4 || memcmp(magic, "GGUF", 4) != 0) {
        throw std::runtime_error(path + " is not a GGUF file");
    }
    // A file that ends with its header may lack the padding behind it, which gguf requires.
    const bool aligned = status.st_size % GGUF_DEFAULT_ALIGNMENT == 0;
    gguf_ptr   header  = read_header(path);
    if (!header && !aligned && (uint64_t) status.st_size <= MAX_HEADER) {
        const memory_file whole(path);
        copy(source, whole.fd, (size_t) status.st_size, path);
        whole.resize(GGML_PAD((uint64_t) status.st_size, GGUF_DEFAULT_ALIGNMENT), path);
        header = read_header(whole.path());
    }
    if (!header) {
        throw std::runtime_error(path + ": the header is damaged or cut off");
    }
    const uint64_t data_offset = gguf_get_data_offset(header.get());
    if (data_offset > MAX_HEADER) {
        throw std::runtime_error(path + ": a header of " + std::to_string(data_offset) + " bytes");
    }
    const int64_t key = gguf_find_key(header.get(), "split.count");
    if (key >= 0 && gguf_get_kv_type(header.get(), key) == GGUF_TYPE_UINT16) {
        split_count = std::max<int>(1, gguf_get_val_u16(header.get(), key));
    }

    file        = std::make_unique<memory_file>(path);
    opened_path = file->path();
    copy(source, file->fd, std::min<uint64_t>(data_offset, (uint64_t) status.st_size), path);
    read_tensors(header.get(), path);
    if (with_numbers) {
        read_numbers(header.get(), source, path);
    }
}

// Copies the tensors that are a single F32 number.
void sparse_file::read_numbers(const gguf_context * header, int source, const std::string & path) const {
    for (int64_t i = 0; i < gguf_get_n_tensors(header); i++) {
        if (gguf_get_tensor_type(header, i) != GGML_TYPE_F32 || gguf_get_tensor_size(header, i) != sizeof(float)) {
            continue;
        }
        const auto at    = (off_t) (gguf_get_data_offset(header) + gguf_get_tensor_offset(header, i));
        float      value = 0;
        if (pread(source, &value, sizeof(value), at) != sizeof(value)) {
            throw std::runtime_error(path + ": the file ends before the number " + gguf_get_tensor_name(header, i) +
                                     ", which graphs depend on: name the whole file");
        }
        if (pwrite(file->fd, &value, sizeof(value), at) != sizeof(value)) {
            throw failure(path);
        }
    }
}

// Stores the tensors' names, and extends the file to the end of the last tensor.
void sparse_file::read_tensors(const gguf_context * header, const std::string & path) {
    const uint64_t data_offset = gguf_get_data_offset(header);
    uint64_t       size        = data_offset;
    names.clear();
    for (int64_t i = 0; i < gguf_get_n_tensors(header); i++) {
        names.emplace_back(gguf_get_tensor_name(header, i));
        size =
            std::max<uint64_t>(size, data_offset + gguf_get_tensor_offset(header, i) + gguf_get_tensor_size(header, i));
    }
    file->resize(size, path);
}

void sparse_file::set_types(const std::map<std::string, ggml_type> & types) {
    const gguf_ptr header = read_header(opened_path);
    if (!header) {
        throw std::runtime_error("the header can't be read again");
    }
    for (const auto & [name, type] : types) {
        if (gguf_find_tensor(header.get(), name.c_str()) >= 0) {
            gguf_set_tensor_type(header.get(), name.c_str(), type);
        }
    }
    auto changed = std::make_unique<memory_file>(opened_path);
    if (!gguf_write_to_file(header.get(), changed->path().c_str(), /*only_meta =*/true)) {
        throw std::runtime_error("the header can't be written");
    }
    file                  = std::move(changed);
    opened_path           = file->path();
    const gguf_ptr reread = read_header(opened_path);
    if (!reread) {
        throw std::runtime_error("the header can't be read again");
    }
    read_tensors(reread.get(), opened_path);
}

sparse_file::~sparse_file()                       = default;
sparse_file::sparse_file(sparse_file &&) noexcept = default;

std::vector<sparse_file> open_model_files(const std::string & path) {
    std::vector<sparse_file> files;
    files.emplace_back(path);
    const int count = files[0].n_files();
    if (count == 1) {
        return files;
    }
    if (count > MAX_FILES) {
        throw std::runtime_error(path + ": a model of " + std::to_string(count) + " files");
    }
    // named NAME-00001-of-00003.gguf
    std::vector<char> text(path.size() + 64);
    if (!llama_split_prefix(text.data(), text.size(), path.c_str(), 0, count)) {
        throw std::runtime_error(path + " is one of " + std::to_string(count) +
                                 " files of a model: name the first, which ends with -00001-of-" +
                                 std::string(5 - std::to_string(count).size(), '0') + std::to_string(count) + ".gguf");
    }
    const std::string prefix = text.data();
    for (int i = 1; i < count; i++) {
        llama_split_path(text.data(), text.size(), prefix.c_str(), i, count);
        files.emplace_back(text.data());
    }
    return files;
}
