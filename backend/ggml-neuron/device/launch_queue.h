// The launch queue of one NeuronCore: launches in flight, jobs that wait to be done, and waiting for them.
//
// Launches of a core are computed in the order in which they are launched, so a kernel may be launched while one that computes its
// inputs is in flight. The host has no such order: whatever reads or writes device memory, or frees what a launch uses, first waits
// for the launches that use it. Waiting lets go of the core's mutex: others read, write and allocate while the device computes.
//
// What has to wait for another core is a job: a copy from there, or an event. So is what a stream does behind a job. A thread of
// the core does its jobs in order, each when what it waits for is done, and the thread that queues one goes on at once. Launches for which no
// job waits go straight to the runtime.
//
// All that is queued, on any core, is in one order in time: a job and its fence on another core are queued with both mutexes held.
// Each waits for what was queued before it, and for nothing else, so no wait is for itself through others.
//
// With nrta_execute_schedule (SDK 2.29 and later) as many launches are in flight as GGML_NEURON_QUEUE_DEPTH says. Without it, or with
// a depth of 1, there is one at a time, which nrt_execute computes.

#pragma once

#include "nrt.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct neuron_memory;
struct neuron_bound_launch;

// Bytes of device memory that a launch reads or writes.
struct neuron_use {
    const neuron_memory * memory  = nullptr;
    size_t                offset  = 0;
    size_t                size    = 0;
    bool                  written = false;
};

// Returns whether two uses, or two operands, have bytes in common.
template <typename T> bool neuron_overlap(const T & a, const T & b) {
    return a.memory == b.memory && a.offset < b.offset + b.size && b.offset < a.offset + a.size;
}

// A sequence of launches whose order matters: those of one ggml backend.
struct neuron_stream {
    neuron_stream();

    const uint64_t id;  // never used twice

    // Guarded by the core's mutex.
    NRT_STATUS failed = NRT_SUCCESS;  // what the first launch that failed came to
    uint64_t   last   = 0;            // the number of its last launch or job
    uint64_t   graph  = 0;            // the number of the graph that is launched
};

// How many launches are in flight on a core at most, unless GGML_NEURON_QUEUE_DEPTH says otherwise. AWS advises to keep two or
// three requests queued.
constexpr size_t NEURON_QUEUE_DEPTH = 3;

// The number of what is not queued: all that is there was queued before it.
constexpr uint64_t NEURON_LAST = UINT64_MAX;

// What a job does, with the core's mutex held, which it may let go of. `number` is the job's.
using neuron_work = std::function<NRT_STATUS(uint64_t number)>;

// Lets go of a mutex for a while.
struct neuron_unlocked {
    explicit neuron_unlocked(std::mutex & mutex) : mutex(mutex) { mutex.unlock(); }

    ~neuron_unlocked() { mutex.lock(); }

    neuron_unlocked(const neuron_unlocked &) = delete;

    std::mutex & mutex;
};

// Returns how many launches of this runtime may be in flight on a core; with 1 each is waited for.
size_t neuron_queue_depth(const neuron_nrt & nrt);

class neuron_launch_queue {
  public:
    neuron_launch_queue(const neuron_nrt & nrt, int vnc, std::mutex & mutex);
    ~neuron_launch_queue();
    neuron_launch_queue(const neuron_launch_queue &) = delete;

    // Returns whether a launch may still be computed when the function that launched it has returned.
    bool is_queue() const { return depth > 1; }

    // Ends the thread that does jobs, of which none may be left. Call it without the core's mutex.
    void stop();

    // All that follow are called with the core's mutex held, and those that wait let go of it meanwhile.

    // Returns whether as many launches are in flight as may be.
    bool is_full();

    // Waits for a launch, of which there must be one.
    void wait_for_first();

    // Waits when the runtime's own queue is full.
    void wait_for_queue();

    // Launches what is bound, whose model is loaded, for a graph of the stream. Returns what is known of it when it is launched: a launch that
    // fails later sets `stream.failed`. NRT_QUEUE_FULL: nothing was launched. One that would read what is poisoned is not launched. `node`
    // is what it computes, `number` that of the job that launches it, else NEURON_LAST.
    NRT_STATUS launch(neuron_bound_launch & bound_launch,
                      neuron_stream &       stream,
                      uint64_t              graph,
                      uint64_t              number,
                      const std::string &   node);

    // Returns whether what uses some memory must be queued: jobs wait, or it writes what another core has yet to read.
    bool must_queue(const std::vector<neuron_use> & uses) const;

    // Queues a job for a stream's graph. Its failure is the stream's, as that of a launch, and poisons what it writes.
    void queue(neuron_stream & stream, std::vector<neuron_use> uses, neuron_work work);

    // Has all that writes to bytes wait until they are released, when a job of another core has read them. Returns the number to
    // release them by: the job's read waits for what was queued before it.
    uint64_t add_fence(const neuron_use & use);
    void     remove_fence(uint64_t number);

    // Launches that were queued in the runtime, and of these those that were while another was in flight; jobs.
    uint64_t queued() const { return n_launched; }

    uint64_t overlapping() const { return n_overlapping; }

    uint64_t jobs_done() const { return n_jobs; }

    // Wait for launches, jobs and fences: what an access to memory by what has the number `before` must wait for, those of a
    // stream, those up to a number.
    void wait_for_use(const neuron_use & use, uint64_t before = NEURON_LAST);

    // Returns whether an access to memory must wait.
    bool is_used(const neuron_use & use) const { return last_conflict(use, NEURON_LAST) != 0; }

    void wait_for(const neuron_stream & stream) { wait_for(stream.last); }

    void wait_for(uint64_t number);

    void wait_for_all() { wait_for(last_number); }

    // Returns whether a launch in flight uses a model, and the number of the last that does.
    bool uses(const void * model, uint64_t & number) const;

    // Returns whether what is in memory is not what was to be computed, because a launch failed after its graph was reported
    // computed.
    bool is_poisoned(const neuron_use & use) const;

    // Forgets what the graph that a stream launches poisoned: its caller is told. What an earlier graph poisoned stays so.
    void forget_poisoned(const neuron_stream & stream);

    // Forgets that bytes are poisoned that are overwritten or freed.
    void forget_poisoned(const neuron_use & use);

  private:
    struct queued_launch {
        uint64_t                    number       = 0;
        nrta_seq_t                  seq          = 0;  // of nrta_execute_schedule
        bool                        done         = false;
        NRT_STATUS                  status       = NRT_SUCCESS;
        const neuron_bound_launch * bound_launch = nullptr;
        neuron_stream *             stream       = nullptr;
        uint64_t                    graph        = 0;  // of the stream
        std::string                 node;
        int64_t                     begin = 0;         // nanoseconds; 0 when nothing is profiled
    };

    struct job {
        uint64_t                number;
        std::vector<neuron_use> uses;
        neuron_stream *         stream;
        uint64_t                graph;
        neuron_work             work;
    };

    // Bytes that a job of another core will read.
    struct fence {
        uint64_t   number;
        neuron_use use;
    };

    struct poisoned_range {
        neuron_use use;
        uint64_t   stream;  // its id
        uint64_t   graph;
    };

    bool reads_poisoned(const neuron_bound_launch & bound_launch, const char * node) const;

    // What the runtime says of a launch.
    enum class answer { PENDING, DONE, UNKNOWN };

    NRT_STATUS schedule(neuron_bound_launch & bound_launch, queued_launch & q);
    NRT_STATUS execute(neuron_bound_launch & bound_launch, queued_launch & q);
    answer     ask(nrta_seq_t seq);
    answer     wait_completed(nrta_seq_t seq);
    void       reap();
    void       complete(queued_launch & q, NRT_STATUS status, const char * function);
    void       widen();
    void       poison(const std::vector<neuron_use> & uses, neuron_stream & stream, uint64_t graph, NRT_STATUS status);
    bool       is_fenced(const std::vector<neuron_use> & uses, uint64_t before) const;
    uint64_t   last_conflict(const neuron_use & use, uint64_t before) const;
    void       work();
    void       profile(const queued_launch & q, NRT_STATUS status);
    NRT_STATUS judge(const queued_launch & q, NRT_STATUS status, const char * function);
    int        take_event();
    void       give_back(int event, nrta_seq_t seq, bool registered);

    const neuron_nrt & nrt;
    const int          vnc;
    std::mutex &       mutex;
    const size_t       depth;
    size_t             room     = depth;                  // what the runtime's queue takes of it
    size_t             n_fitted = 0;                      // launches that are done since it was full or had more room
    std::deque<std::unique_ptr<queued_launch>> launched;  // in order

    // Those that the runtime did not know any more, in order: it may still write their status, until it is done with a later one.
    std::deque<std::unique_ptr<queued_launch>> parked;
    std::deque<std::unique_ptr<job>>           jobs;    // in order, behind all launches
    std::vector<fence>                         fences;  // in order
    std::thread                                worker;  // does the jobs, from the first on
    bool                                       stopping = false;
    std::vector<poisoned_range>                poisoned;
    std::vector<int>                           events;      // eventfds that no thread waits for
    bool                                       has_events;  // the runtime signals them
    std::condition_variable_any                changed;     // nrt_execute returned; jobs and fences came or went
    uint64_t                                   last_number   = 0;
    uint64_t                                   n_launched    = 0;
    uint64_t                                   n_overlapping = 0;
    uint64_t                                   n_jobs        = 0;
    int64_t           last_done         = 0;  // when the last launch that is profiled was seen to be done
    bool              said_not_a_number = false;
    std::atomic<bool> said_busy{ false };
};
