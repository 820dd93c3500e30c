#include "mapping.h"

#include "error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace nk {

mapping::mapping(const char * path) {
    // Without O_NONBLOCK the opening of a FIFO would wait for a writer.
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        fail(NEURON_KERNELS_ERROR_IO, "can't be opened: %s", strerror(errno));
    }

    struct closer {
        int fd;

        ~closer() { close(fd); }
    } close_at_end{ fd };

    struct stat info;
    if (fstat(fd, &info) != 0) {
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
    void * mapped = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) {
        fail(NEURON_KERNELS_ERROR_IO, "can't be mapped into memory: %s", strerror(errno));
    }
    address = mapped;
    length  = static_cast<size_t>(info.st_size);
}

mapping & mapping::operator=(mapping && other) noexcept {
    std::swap(address, other.address);
    std::swap(length, other.length);
    return *this;
}

mapping::~mapping() {
    if (address) {
        munmap(address, length);
    }
}

std::string real_path(const std::string & path) {
    char *            found = realpath(path.c_str(), nullptr);
    const std::string real  = found ? found : "";
    free(found);
    return real;
}

}  // namespace nk
