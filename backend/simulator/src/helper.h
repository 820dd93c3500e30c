// The helper: a Python process that compiles and runs HLO with XLA. It maps the arenas, so requests are small.

#pragma once

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "fds.h"
#include "protocol.h"

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulator {

// The outcome of a request.
enum class outcome {
    answered,
    not_sent,  // the helper was gone before the request reached it
    lost,      // the helper ended during the request
    timed_out,
    refused,   // this process has no descriptors for a pipe; the helper is not affected
};

// Two pipes for one request at a time and its answer. They take two thirds of the time of a socket.
class lane {
  public:
    // `ok`: whether the pipes were made.
    explicit lane(bool & ok);

    // Calls `send` with the helper's ends, then closes the ends that only the helper uses. Returns the result of `send`.
    template <typename F> bool pass(F send) {
        const int  fds[] = { asked_.get(), other_.get() };
        const bool sent  = send(fds, 2);
        other_.reset();  // an open copy would hide the end of the helper
        return sent;
    }

    // Returns false if the helper has ended.
    bool send(const std::vector<uint8_t> & message);

    // Waits for the answer, which replaces `message`: for `timeout` seconds, or without a limit if it is 0.
    outcome receive(std::vector<uint8_t> & message, double timeout);

  private:
    unique_fd ask_;
    unique_fd
        asked_;  // also the helper's end: unread bytes are a request that the helper did not begin, and an open end
                 // prevents SIGPIPE
    unique_fd answer_;
    unique_fd other_;                                                                             // the helper's

    std::vector<uint8_t> room_ = std::vector<uint8_t>(sizeof(uint32_t) + protocol::MAX_MESSAGE);  // for an answer
};

// A running helper process. Any number of threads may make requests at once.
class helper {
  public:
    // Starts a process and waits until it is ready. Returns null, with the reason in `error`, when that fails.
    static std::shared_ptr<helper> start(const std::vector<std::shared_ptr<arena>> & arenas, std::string & error);

    // Ends the process.
    ~helper();
    helper(const helper &)             = delete;
    helper & operator=(const helper &) = delete;

    // Sends a request and waits for the answer, which replaces `message`: for `timeout` seconds, or without a limit if
    // it is 0. After `not_sent`, `lost` and `timed_out` the helper is broken.
    outcome call(std::vector<uint8_t> & message, double timeout);

    bool broken() const { return broken_; }

    // Makes the next request the last one: the process is killed during it.
    void doom() { doomed_ = true; }

    // Returns a number that is unique among the helpers of this process.
    uint64_t number() const { return number_; }

    // Waits for the end of a broken helper's process and returns how it ended, as text.
    std::string obituary();

  private:
    helper() = default;

    outcome new_lane(std::unique_ptr<lane> & out);
    void    send_signal(int signal);
    void    end();

    unique_fd                          control_;
    pid_t                              pid_    = -1;
    uint64_t                           number_ = 0;
    std::atomic<bool>                  broken_{ false };
    std::atomic<bool>                  doomed_{ false };
    std::mutex                         mutex_;   // guards the members below
    std::vector<std::unique_ptr<lane>> idle_;
    std::string                        ending_;  // how the process ended, once it was waited for
};

}  // namespace simulator
