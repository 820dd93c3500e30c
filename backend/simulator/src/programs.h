// What programs take of a core's memory, besides their tensors.

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

    // Counts a program of so many bytes. Returns false when the core has no memory for it.
    bool add(size_t size);

    // Counts what a program, which was added, needs of the scratchpad. Returns false when the core has no memory for it.
    bool add_scratchpad(size_t size);

    // Both as they were counted for it.
    void remove(size_t size, size_t scratchpad);

  private:
    size_t pages() const;

    const std::shared_ptr<arena> core_;
    const size_t                 microcode_;
    const size_t                 page_;

    std::mutex            mutex_;
    bool                  started_ = false;  // the micro-code is there, and stays
    std::multiset<size_t> scratchpads_;      // of the programs that need one
};

}  // namespace simulator
