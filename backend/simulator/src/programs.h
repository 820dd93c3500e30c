// The memory of programs on a core, besides tensors.

#pragma once

#include "arena.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

namespace simulator {

// The programs of a core. Their memory is the micro-code, loaded with the first program, each program's own bytes, and
// one scratchpad that they share, as large as the largest that a program needs. Thread-safe.
class programs {
  public:
    // `microcode`: bytes. `page`: the bytes in whose multiples the scratchpad grows.
    programs(std::shared_ptr<arena> core, size_t microcode, size_t page) :
        core_(std::move(core)), microcode_(microcode), page_(page) {}

    // Counts a program of this many bytes. Returns false if the core lacks the memory.
    bool add(size_t size);

    // Counts the scratchpad of an added program. Returns false if the core lacks the memory.
    bool add_scratchpad(size_t size);

    // Both sizes must be the ones that were counted.
    void remove(size_t size, size_t scratchpad);

  private:
    size_t pages() const;

    const std::shared_ptr<arena> core_;
    const size_t                 microcode_;
    const size_t                 page_;

    std::mutex            mutex_;
    bool                  started_ = false;  // the micro-code is loaded; it stays loaded
    std::multiset<size_t> scratchpads_;      // of the programs that need one
};

}  // namespace simulator
