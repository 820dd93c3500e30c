// The helper: a process of Python that compiles and runs HLO with XLA. It sees the arenas, so requests are small.

#pragma once

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "fds.h"

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulator {

// What became of a request.
enum class outcome {
    answered,
    not_sent,  // the helper was gone before the request reached it
    lost,      // it went while it had the request
    timed_out,
    refused,   // this process has no socket left for it; the helper is well
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

    // Sends a request and waits for the answer, which replaces `message`, for `timeout` seconds or (0) however long it takes. After
    // `not_sent`, `lost` and `timed_out` the helper is broken.
    outcome call(std::vector<uint8_t> & message, double timeout);

    bool broken() const { return broken_; }

    // The next request is its last: its process is killed while it has it.
    void doom() { doomed_ = true; }

    // A number that no other helper of this process has.
    uint64_t number() const { return number_; }

    // Of a broken helper: how it ended, as text. Waits for the end of its process.
    std::string obituary();

  private:
    struct lane {
        unique_fd socket;
        double    timeout = 0;

        std::vector<uint8_t> room;  // for an answer
    };

    helper() = default;

    outcome new_lane(lane & out);
    void    send_signal(int signal);
    void    end();

    unique_fd         control_;
    pid_t             pid_    = -1;
    uint64_t          number_ = 0;
    std::atomic<bool> broken_{ false };
    std::atomic<bool> doomed_{ false };
    std::mutex        mutex_;   // guards what follows
    std::vector<lane> idle_;
    std::string       ending_;  // how the process ended, once it was waited for
};

}  // namespace simulator
