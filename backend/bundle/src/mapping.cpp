#include "mapping.h"

#include "error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

namespace nk {

mapping::mapping(const char * path) {
    // Without O_NONBLOCK, open() on a FIFO waits for a writer.
    mapping opened;  // closed when this fails
    opened.file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened.file < 0) {
        fail(NEURON_KERNELS_ERROR_IO, "can't be opened: %s", strerror(errno));
    }
    struct stat info;
    if (fstat(opened.file, &info) != 0) {
        fail(NEURON_KERNELS_ERROR_IO, "can't be examined: %s", strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        fail(NEURON_KERNELS_ERROR_IO, "%s; expected a regular file",
             S_ISDIR(info.st_mode) ? "a directory" : "a device, pipe or socket");
    }
    if (static_cast<uintmax_t>(info.st_size) > SIZE_MAX) {
        fail(NEURON_KERNELS_ERROR_IO, "larger than the address space");
    }
    if (info.st_size == 0) {
        return;
    }
    void * mapped = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, opened.file, 0);
    if (mapped == MAP_FAILED) {
        fail(NEURON_KERNELS_ERROR_IO, "can't be mapped into memory: %s", strerror(errno));
    }
    opened.address = mapped;
    opened.length  = static_cast<size_t>(info.st_size);
    *this          = std::move(opened);
}

void mapping::read(size_t offset, void * out, size_t n) const {
    auto * to = static_cast<uint8_t *>(out);
    while (n > 0) {
        const ssize_t got = pread(file, to, n, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail(NEURON_KERNELS_ERROR_IO, "its NEFF can't be read: %s", strerror(errno));
        }
        if (got == 0) {
            fail(
                NEURON_KERNELS_ERROR_CORRUPT,
                "its NEFF is damaged: the pack had %zu bytes when it was opened, and has no byte %zu any more; replace "
                "a pack by renaming another one over it",
                length, offset);
        }
        to += got;
        offset += static_cast<size_t>(got);
        n -= static_cast<size_t>(got);
    }
}

int64_t mapping::state() const {
    struct stat info;
    if (file < 0) {
        return 1;
    }
    if (fstat(file, &info) != 0 || time(nullptr) <= info.st_ctim.tv_sec + 1) {
        return 0;
    }
    return int64_t{ info.st_ctim.tv_sec } * 1000000000 + info.st_ctim.tv_nsec;
}

mapping & mapping::operator=(mapping && other) noexcept {
    std::swap(file, other.file);
    std::swap(address, other.address);
    std::swap(length, other.length);
    return *this;
}

mapping::~mapping() {
    if (address) {
        munmap(address, length);
    }
    if (file >= 0) {
        close(file);
    }
}

}  // namespace nk
