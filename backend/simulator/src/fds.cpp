#include "fds.h"

#include <unistd.h>

#include <array>
#include <atomic>

namespace simulator {

// There are a few per core, and one per thread that executes at the same time as others. A child inherits a descriptor
// that found no place here.
static std::array<std::atomic<int>, 1024> held;  // descriptor + 1, or 0

static void replace(int from, int to) {
    for (auto & slot : held) {
        int expected = from;
        if (slot.load(std::memory_order_relaxed) == from && slot.compare_exchange_strong(expected, to)) {
            return;
        }
    }
}

unique_fd::unique_fd(int fd) : fd_(fd) {
    if (fd >= 0) {
        replace(0, fd + 1);
    }
}

void unique_fd::reset() {
    if (fd_ >= 0) {
        replace(fd_ + 1, 0);
        close(fd_);
        fd_ = -1;
    }
}

void close_all_fds() {
    for (auto & slot : held) {
        const int fd = slot.exchange(0);
        if (fd > 0) {
            close(fd - 1);
        }
    }
}

}  // namespace simulator
