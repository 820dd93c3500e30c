#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace simulator {

static size_t rounded(size_t size) {
    return (size + arena::ALIGNMENT - 1) & ~(arena::ALIGNMENT - 1);
}

std::shared_ptr<arena> arena::create(uint32_t index, const char * name, size_t size, std::string & error) {
    std::shared_ptr<arena> made(new arena(index, size));
    made->fd_ = unique_fd(memfd_create(name, MFD_CLOEXEC));
    if (!made->fd_ || ftruncate(made->fd(), static_cast<off_t>(size)) != 0) {
        error = std::string("no shared memory: ") + strerror(errno);
        return nullptr;
    }
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, made->fd(), 0);
    if (data == MAP_FAILED) {
        error = "no room to map " + std::to_string(size) + " bytes: " + strerror(errno);
        return nullptr;
    }
    // A child of fork does not map the arena: it would write to its parent's tensors.
    madvise(data, size, MADV_DONTFORK);
    made->data_    = static_cast<uint8_t *>(data);
    made->free_[0] = size;
    return made;
}

arena::~arena() {
    if (data_ != nullptr) {
        munmap(data_, size_);
    }
}

size_t arena::used() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return used_;
}

bool arena::charge(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size > size_ || used_ + size > size_) {
        return false;
    }
    used_ += size;
    return true;
}

void arena::discharge(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= size;
}

bool arena::allocate(size_t size, size_t & offset) {
    if (size > size_) {
        return false;  // and rounding it up cannot overflow
    }
    const size_t                      bytes = rounded(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (used_ + bytes > size_) {
        return false;
    }
    for (auto range = free_.begin(); range != free_.end(); ++range) {
        if (range->second < bytes) {
            continue;
        }
        offset            = range->first;
        const size_t rest = range->second - bytes;
        free_.erase(range);
        if (rest > 0) {
            free_[offset + bytes] = rest;
        }
        used_ += bytes;
        return true;
    }
    return false;
}

void arena::release(size_t offset, size_t size) {
    const size_t                      bytes = rounded(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= bytes;
    // Returns whole pages to the machine. They read as zeros when they are allocated again.
    const size_t page = 4096;
    punch((offset + page - 1) & ~(page - 1), (offset + bytes) & ~(page - 1));
    auto range = free_.emplace(offset, bytes).first;
    auto next  = std::next(range);
    if (next != free_.end() && range->first + range->second == next->first) {
        range->second += next->second;
        free_.erase(next);
    }
    if (range != free_.begin()) {
        auto before = std::prev(range);
        if (before->first + before->second == range->first) {
            before->second += range->second;
            free_.erase(range);
        }
    }
}

// Returns the pages from `begin` to `end`, both multiples of the page size, to the machine. They then read as zeros.
bool arena::punch(size_t begin, size_t end) const {
    return begin < end && fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                                    static_cast<off_t>(end - begin)) == 0;
}

// Shorter runs of zeros are written, because a hole costs more.
static constexpr size_t HOLE = size_t(256) << 10;

static bool is_zero(const uint8_t * data, size_t size) {
    return data[0] == 0 && memcmp(data, data + 1, size - 1) == 0;
}

void arena::write(size_t offset, const void * from, size_t size) const {
    const auto * bytes = static_cast<const uint8_t *>(from);
    for (size_t done = 0; done < size;) {
        const size_t at   = offset + done;
        const size_t part = std::min(size - done, HOLE - at % HOLE);
        if (part < HOLE || !is_zero(bytes + done, part) || !punch(at, at + part)) {
            memcpy(data_ + at, bytes + done, part);
        }
        done += part;
    }
}

void arena::fill(size_t offset, int value, size_t size) const {
    const size_t first = (offset + HOLE - 1) / HOLE * HOLE;
    const size_t last  = (offset + size) / HOLE * HOLE;
    if (value != 0 || first >= last || !punch(first, last)) {
        memset(data_ + offset, value, size);
        return;
    }
    memset(data_ + offset, value, first - offset);
    memset(data_ + last, value, offset + size - last);
}

std::shared_ptr<memory> memory::allocate(const std::shared_ptr<arena> & from, size_t size) {
    size_t offset;
    if (!from->allocate(size, offset)) {
        return nullptr;
    }
    return std::shared_ptr<memory>(new memory(from, offset, size));
}

}  // namespace simulator
