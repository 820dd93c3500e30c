#include "programs.h"

namespace simulator {

bool programs::add(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!core_->charge(size + (started_ ? 0 : microcode_))) {
        return false;
    }
    started_ = true;
    return true;
}

bool programs::add_scratchpad(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size == 0) {
        return true;
    }
    const size_t before = pages();
    const auto   added  = scratchpads_.insert(size);
    if (!core_->charge(pages() - before)) {
        scratchpads_.erase(added);
        return false;
    }
    return true;
}

void programs::remove(size_t size, size_t scratchpad) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t                      before = pages();
    const auto                        found  = scratchpads_.find(scratchpad);
    if (found != scratchpads_.end()) {
        scratchpads_.erase(found);
    }
    core_->discharge(size + before - pages());
}

// Returns the bytes of the scratchpad.
size_t programs::pages() const {
    return scratchpads_.empty() ? 0 : (*scratchpads_.rbegin() + page_ - 1) / page_ * page_;
}

}  // namespace simulator
