// Execution units: the queues of nrta_* requests. Each has a thread that executes them one at a time, in order.
//
// Source: AWS Neuron, "Neuron Runtime Async APIs" and nrt_async.h of SDK 2.29 and later. AWS does not document how many
// requests a queue holds, which requests take more than one place, and the numbers of units. The simulator chooses
// these; NEURON_SIMULATOR_QUEUE sets the first.

#pragma once

#include "../../nrt/nrt_api.h"
#include "fds.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace simulator {

// Bytes of an arena that a request reads or writes.
struct span {
    uint32_t arena;
    size_t   begin;
    size_t   end;
    bool     written;
};

// Returns whether the order of two accesses matters: they share bytes, and one of them writes.
bool conflict(const span & a, const span & b);

struct request {
    using clock = std::chrono::steady_clock;

    std::function<NRT_STATUS()> run;
    std::vector<span>           spans;
    std::vector<const void *>   handles;        // must not be freed before it is done
    size_t                      places = 1;     // the places that it takes in the queue
    clock::time_point           not_before;     // the earliest time at which the device begins it
    NRT_STATUS *                ret = nullptr;  // receives the status; null: the log receives it

    const void * freed  = nullptr;              // guarded by the unit's mutex: the first of `handles` that was freed
    uint64_t     number = 0;                    // within its unit, from 1

    std::vector<unique_fd> events;              // guarded by the unit's mutex: signaled when it is done
};

// One queue of one execution unit. Thread-safe.
class unit {
  public:
    // `capacity`: places for requests, including the running one.
    unit(uint16_t id, size_t capacity) : id_(id), capacity_(capacity) {}

    ~unit() { stop(); }

    unit(const unit &)             = delete;
    unit & operator=(const unit &) = delete;

    // Waits for the running request, then stops.
    void stop();

    // Queues a request. Returns NRT_QUEUE_FULL, and changes nothing, if the queue has no room or already has `most`
    // requests; an empty queue has room for any request. Returns NRT_EXEC_UNIT_UNRECOVERABLE after a request that ended
    // with it.
    NRT_STATUS submit(std::shared_ptr<request> request, nrta_seq_t & seq, size_t most = SIZE_MAX);

    // Returns false if the number is unknown or forgotten.
    bool completed(uint64_t number, bool & out) const;

    // Forgets a request, but still executes it (NEURON_SIMULATOR_FAULT).
    void forget(uint64_t number);

    // Returns the last completed request; number 0 if there is none.
    nrta_seq_t last() const;

    // Signals the eventfd when the request is done. Returns false if the number is unknown or forgotten.
    bool notify(uint64_t number, unique_fd event);

    // Unregisters a request's eventfds. Returns false in the same cases as `notify`.
    bool unregister(uint64_t number);

    // Returns the number of requests with registered eventfds.
    size_t registered() const;

    // Returns the number of pending requests.
    size_t size() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return queue_.size();
    }

    // Calls a function with each pending request until it returns true; returns whether it did.
    template <typename F> bool any(F function) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & request : queue_) {
            if (function(*request)) {
                return true;
            }
        }
        return false;
    }

  private:
    void work();
    void finish(const std::shared_ptr<request> & done, NRT_STATUS status);
    bool knows(uint64_t number) const;

    nrta_seq_t seq(uint64_t number) const { return static_cast<nrta_seq_t>(id_) << 48 | number; }

    const uint16_t                       id_;
    const size_t                         capacity_;
    mutable std::mutex                   mutex_;  // guards the members below
    std::condition_variable              changed_;
    std::deque<std::shared_ptr<request>> queue_;
    size_t                               taken_ = 0;   // places
    std::set<uint64_t>                   registered_;  // requests with eventfds
    std::set<uint64_t>                   forgotten_;
    bool                                 stopped_ = false;
    bool                                 lost_    = false;
    std::thread                          thread_;
    std::atomic<uint64_t>                submitted_{ 0 };  // written with the mutex held, like `done_`
    std::atomic<uint64_t>                done_{ 0 };
};

// The queues of all cores.
class units {
  public:
    static constexpr uint32_t TENSOR_QUEUES = 2;

    units(uint32_t cores, size_t capacity);

    void stop();

    // Returns the number of requests with registered eventfds.
    size_t registered() const;

    // Returns whether any queue has a pending request.
    bool any_queued() const;

    // Returns null for an unknown queue.
    unit * find(uint32_t core, nrta_xu_t kind, int queue) const;

    // Returns null for an unknown sequence ID.
    unit * find(nrta_seq_t seq) const;

    // Returns whether a pending request's use of the spans conflicts with this one. Skips the queue `except`, which
    // keeps the order of its requests.
    bool busy(const std::vector<span> & spans, const unit * except) const;

    // Marks a handle as freed, which fails the requests that use it. Returns whether there are any.
    bool freed(const void * handle) const;

  private:
    std::vector<std::unique_ptr<unit>> all_;  // per core: two for tensors, one for models
};

}  // namespace simulator
