// Ranks: the NeuronCores that compute one program together, and their barriers.
//
// Source: AWS Neuron, nrt.h, nrt_experimental.h, and "Communication timeout" and "Hang on Collectives" of the runtime's
// troubleshooting guide. A program is loaded when all its ranks have loaded it, and an execution begins when all have begun it.

#pragma once

#include "../../nrt/nrt_api.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulator {

// A group of ranks that compute together. Each rank enters a round; the round runs when all ranks have entered. Thread-safe.
class group {
  public:
    // The ranks' arguments, by rank. They are valid until it returns.
    using action = std::function<NRT_STATUS(const std::vector<const void *> &)>;

    explicit group(uint32_t count) : count_(count), current_(std::make_shared<round>(count)) {}

    group(const group &)             = delete;
    group & operator=(const group &) = delete;

    uint32_t count() const { return count_; }

    // Waits until all ranks are there, for `seconds` at most, has the last one do `act`, and returns its status to all.
    // When one does not come, all get NRT_TIMEOUT, or NRT_EXEC_HW_ERR_COLLECTIVES when one failed instead of coming, and every later
    // round ends with that at once: what the device's queues hold then is not known.
    NRT_STATUS meet(uint32_t rank, const void * what, double seconds, const action & act, const char * where);

    // Marks a rank as failed: it will not enter.
    void leave(uint32_t rank);

    // Waits for this many seconds, or until a round fails.
    void pause(double seconds);

    // Ends all waiting, with NRT_CLOSED.
    void close();

    // Returns whether a round failed.
    bool failed() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return failed_ != NRT_SUCCESS;
    }

  private:
    struct round {
        explicit round(uint32_t count) : brought(count), here(count) {}

        std::vector<const void *> brought;
        std::vector<bool>         here;
        uint32_t                  arrived = 0;
        bool                      held    = false;  // all are there
        bool                      over    = false;
        NRT_STATUS                status  = NRT_SUCCESS;
    };

    void end(round & ended, NRT_STATUS status);

    std::string missing(const round & own) const;

    const uint32_t          count_;
    mutable std::mutex      mutex_;  // guards what follows
    std::condition_variable changed_;
    std::shared_ptr<round>  current_;
    std::vector<uint32_t>   left_;  // ranks that failed
    NRT_STATUS              failed_ = NRT_SUCCESS;
};

// The groups of this process's ranks, and their communicators.
class ranks {
  public:
    // The purpose of a group. Groups of different kinds are separate.
    enum kind { LOAD, COMMUNICATOR, BARRIER };

    // A core's number among all devices, and the number of devices (nrt_build_global_comm).
    using communicator = std::pair<uint32_t, uint32_t>;

    // Returns the group that a rank belongs to: the first of its kind and size that this rank did not join yet, or a new one.
    std::shared_ptr<group> join(kind kind, uint32_t rank, uint32_t count);

    // Closes the group to further ranks.
    void give_up(const std::shared_ptr<group> & group);

    // Returns false if the core has another communicator.
    bool set_communicator(uint32_t core, communicator made);

    // Returns false if the core has no communicator.
    bool communicator_of(uint32_t core, communicator & out) const;

    // Ends all waiting of all groups.
    void close();

  private:
    struct joining {
        kind                   what;
        std::shared_ptr<group> members;
        std::vector<bool>      joined;
    };

    mutable std::mutex                mutex_;  // guards what follows
    std::list<joining>                joining_;
    std::vector<std::weak_ptr<group>> all_;
    std::map<uint32_t, communicator>  communicators_;  // by core
    bool                              closed_ = false;
};

}  // namespace simulator
