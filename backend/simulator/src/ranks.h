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
    // A function of the ranks' arguments, in the order of the ranks. They are valid until it returns.
    using action = std::function<NRT_STATUS(const std::vector<const void *> &)>;

    explicit group(uint32_t count) : count_(count), current_(std::make_shared<round>(count)) {}

    group(const group &)             = delete;
    group & operator=(const group &) = delete;

    uint32_t count() const { return count_; }

    // Waits at most `seconds` until all ranks have entered. The last one calls `act`, and all return its status. If a
    // rank does not enter, all return NRT_TIMEOUT; if a rank failed before it entered, NRT_EXEC_HW_ERR_COLLECTIVES.
    // Every later round then ends at once with the same status, because the state of the device's queues is unknown.
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
        bool                      held    = false;  // all ranks have entered
        bool                      over    = false;
        NRT_STATUS                status  = NRT_SUCCESS;
    };

    void end(round & ended, NRT_STATUS status);

    std::string missing(const round & own) const;

    const uint32_t          count_;
    mutable std::mutex      mutex_;  // guards the members below
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

    // Returns a rank's group: the first one of its kind and size that this rank has not joined, or a new one.
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

    mutable std::mutex                mutex_;  // guards the members below
    std::list<joining>                joining_;
    std::vector<std::weak_ptr<group>> all_;
    std::map<uint32_t, communicator>  communicators_;  // by core
    bool                              closed_ = false;
};

}  // namespace simulator
