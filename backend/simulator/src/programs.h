// The memory of programs on a core, besides tensors.

#pragma once

#include "arena.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

namespace simulator {

// The programs of a core: micro-code with the first one, something for each, and a scratchpad that all share and that is as large as the
// largest of them needs. Any number of threads may use it at once.
class programs {
  public:
    // `microcode`: bytes. `page`: bytes in multiples of which the scratchpad grows.
    programs(std::shared_ptr<arena> core, size_t microcode, size_t page) :
        core_(std::move(core)), microcode_(microcode), page_(page) {}

    // Counts a program of this many bytes. Returns false if the core lacks the memory.
    bool add(size_t size);

    // Counts the scratchpad of an added program. Returns false if the core lacks the memory.
    bool add_scratchpad(size_t size);

    // Both sizes must be those that were counted.
    void remove(size_t size, size_t scratchpad);

  private:
    size_t pages() const;

    const std::shared_ptr<arena> core_;
    const size_t                 microcode_;
    const size_t                 page_;

    std::mutex            mutex_;
    bool                  started_ = false;  // the micro-code is loaded, and stays
    std::multiset<size_t> scratchpads_;      // of the programs that need one
};

}  // namespace simulator
