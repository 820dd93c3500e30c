// Shared memory that tensors are allocated from: one arena per simulated core, and one for the host.
//
// An arena is one memfd, mapped as a whole here and in the helper, so both sides identify a tensor by arena and offset, and
// its bytes are never copied between them. Unwritten memory takes no RAM, and freed memory is returned to the system.

#pragma once

#include "fds.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace simulator {

class arena {
  public:
    // XLA uses a tensor in place if its address is a multiple of this, and copies it otherwise.
    static constexpr size_t ALIGNMENT = 64;

    // Returns an arena of `size` bytes; null, with the reason in `error`, if the machine lacks the memory.
    static std::shared_ptr<arena> create(uint32_t index, const char * name, size_t size, std::string & error);

    ~arena();
    arena(const arena &)             = delete;
    arena & operator=(const arena &) = delete;

    // Returns false when no range of `size` bytes is free; size is not 0.
    bool allocate(size_t size, size_t & offset);
    void release(size_t offset, size_t size);

    uint8_t * data() const { return data_; }

    uint32_t index() const { return index_; }

    size_t size() const { return size_; }

    int fd() const { return fd_.get(); }

    size_t used() const;

    // Write to an allocated range. Large runs of zeros take no memory: unwritten memory reads as zeros.
    void write(size_t offset, const void * from, size_t size) const;
    void fill(size_t offset, int value, size_t size) const;

    // Counts bytes as used without allocating them, such as a runtime's own memory. Returns false if they do not fit.
    bool charge(size_t size);
    void discharge(size_t size);

  private:
    arena(uint32_t index, size_t size) : index_(index), size_(size) {}

    bool punch(size_t begin, size_t end) const;

    const uint32_t           index_;
    const size_t             size_;
    unique_fd                fd_;
    uint8_t *                data_ = nullptr;
    mutable std::mutex       mutex_;
    std::map<size_t, size_t> free_;  // offset → bytes; neighbours are merged
    size_t                   used_ = 0;
};

// A range of an arena. It is freed with the last tensor that shares it.
class memory {
  public:
    // Returns null if the arena is full.
    static std::shared_ptr<memory> allocate(const std::shared_ptr<arena> & from, size_t size);

    ~memory() { arena_->release(offset_, size_); }

    memory(const memory &)             = delete;
    memory & operator=(const memory &) = delete;

    const arena & in() const { return *arena_; }

    size_t offset() const { return offset_; }

    uint8_t * data() const { return arena_->data() + offset_; }

  private:
    memory(std::shared_ptr<arena> from, size_t offset, size_t size) :
        arena_(std::move(from)), offset_(offset), size_(size) {}

    const std::shared_ptr<arena> arena_;
    const size_t                 offset_;
    const size_t                 size_;
};

}  // namespace simulator
