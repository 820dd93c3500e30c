#include "units.h"

#include "log.h"

#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>

namespace simulator {

bool conflict(const span & a, const span & b) {
    return a.arena == b.arena && a.begin < b.end && b.begin < a.end && (a.written || b.written);
}

// A sleep ends late, but by less than this.
static constexpr std::chrono::microseconds OVERSLEEP{ 80 };

static void wait_until(request::clock::time_point time) {
    if (time - request::clock::now() > 2 * OVERSLEEP) {
        std::this_thread::sleep_until(time - OVERSLEEP);
    }
    while (request::clock::now() < time) {
    }
}

static void signal_event(const unique_fd & event) {
    eventfd_write(event.get(), 1);
}

void unit::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

NRT_STATUS unit::submit(std::shared_ptr<request> request, nrta_seq_t & out, size_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost_) {
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    }
    if (!queue_.empty() && (taken_ + request->places > capacity_ || queue_.size() >= most)) {
        return NRT_QUEUE_FULL;
    }
    if (stopped_) {
        return NRT_CLOSED;
    }
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { work(); });
    }
    request->number = submitted_ + 1;
    taken_ += request->places;
    queue_.push_back(std::move(request));
    out = seq(++submitted_);
    changed_.notify_one();
    return NRT_SUCCESS;
}

void unit::work() {
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        std::shared_ptr<request> next;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
            if (stopped_) {
                return;
            }
            next = queue_.front();
        }
        wait_until(next->not_before);
        NRT_STATUS status;
        try {
            status = next->run();
        } catch (const std::exception & error) {
            log(level::error, "nrta", "%s", error.what());
            status = NRT_FAIL_HOST_MEM_ALLOC;
        }
        // Releases its objects before it is reported as done, so that the memory of a model unloaded after that is
        // free.
        next->run = nullptr;
        finish(next, status);
    }
}

void unit::finish(const std::shared_ptr<request> & done, NRT_STATUS status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done->freed != nullptr && status == NRT_SUCCESS) {
        status = NRT_INVALID_HANDLE;
    }
    // Writes the status before the request is reported as done.
    if (done->ret != nullptr) {
        *done->ret = status;
    }
    lost_ = lost_ || status == NRT_EXEC_UNIT_UNRECOVERABLE;
    done_ = done->number;
    queue_.pop_front();
    taken_ -= done->places;
    for (const unique_fd & event : done->events) {
        signal_event(event);
    }
}

// The caller holds the mutex.
bool unit::knows(uint64_t number) const {
    return number > 0 && number <= submitted_ && forgotten_.count(number) == 0;
}

bool unit::completed(uint64_t number, bool & out) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    out = number <= done_;
    return knows(number);
}

void unit::forget(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forgotten_.insert(number);
}

nrta_seq_t unit::last() const {
    return seq(done_);
}

bool unit::notify(uint64_t number, unique_fd event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!knows(number)) {
        return false;
    }
    registered_.insert(number);
    for (const auto & request : queue_) {
        if (request->number == number) {
            request->events.push_back(std::move(event));
            return true;
        }
    }
    signal_event(event);
    return true;
}

bool unit::unregister(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!knows(number)) {
        return false;
    }
    registered_.erase(number);
    for (const auto & request : queue_) {
        if (request->number == number) {
            request->events.clear();
        }
    }
    return true;
}

size_t unit::registered() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return registered_.size();
}

units::units(uint32_t cores, size_t capacity) {
    for (uint32_t i = 0; i < cores * (TENSOR_QUEUES + 1); i++) {
        all_.push_back(std::make_unique<unit>(static_cast<uint16_t>(i), capacity));
    }
}

void units::stop() {
    for (const auto & one : all_) {
        one->stop();
    }
}

size_t units::registered() const {
    size_t n = 0;
    for (const auto & one : all_) {
        n += one->registered();
    }
    return n;
}

bool units::any_queued() const {
    return std::any_of(all_.begin(), all_.end(), [](const auto & one) { return one->size() > 0; });
}

unit * units::find(uint32_t core, nrta_xu_t kind, int queue) const {
    const bool   compute = kind == NRTA_XU_COMPUTE;
    const size_t queues  = compute ? 1 : TENSOR_QUEUES;
    if ((!compute && kind != NRTA_XU_TENSOR_OP) || queue < 0 || static_cast<size_t>(queue) >= queues) {
        return nullptr;
    }
    const size_t index = core * (TENSOR_QUEUES + 1) + (compute ? TENSOR_QUEUES : static_cast<size_t>(queue));
    return index < all_.size() ? all_[index].get() : nullptr;
}

unit * units::find(nrta_seq_t seq) const {
    const size_t index = NRTA_SEQ_GET_XU_ID(seq);
    return index < all_.size() ? all_[index].get() : nullptr;
}

bool units::busy(const std::vector<span> & spans, const unit * except) const {
    for (const auto & one : all_) {
        const bool found = one.get() != except && one->any([&](const request & other) {
            for (const span & theirs : other.spans) {
                for (const span & ours : spans) {
                    if (conflict(theirs, ours)) {
                        return true;
                    }
                }
            }
            return false;
        });
        if (found) {
            return true;
        }
    }
    return false;
}

bool units::freed(const void * handle) const {
    bool used = false;
    for (const auto & one : all_) {
        one->any([&](request & other) {
            for (const void * own : other.handles) {
                if (own == handle) {
                    other.freed = handle;
                    used        = true;
                }
            }
            return false;
        });
    }
    return used;
}

}  // namespace simulator
