// Launches in flight on one NeuronCore, and who waits for them.
//
// Launches of a core are computed in the order in which they are launched, so a kernel may be launched while one that computes its
// inputs is in flight. The host has no such order: whatever reads or writes device memory, or frees what a launch uses, first waits
// for the launches that use it. Waiting lets go of the core's mutex: others read, write and allocate while the device computes.
//
// With nrta_execute_schedule (SDK 2.29 and later) as many launches are in flight as GGML_NEURON_QUEUE_DEPTH says. Without it, or with
// a depth of 1, there is one at a time, which nrt_execute computes.

#pragma once

#include "nrt.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct neuron_memory;
struct neuron_step;

// Bytes of device memory that a launch reads or writes.
struct neuron_use {
    const neuron_memory * memory  = nullptr;
    size_t                offset  = 0;
    size_t                size    = 0;
    bool                  written = false;
};

// A sequence of launches whose order matters to somebody: those of one ggml backend.
struct neuron_stream {
    neuron_stream();

    const uint64_t id;  // never used twice

    // Guarded by the core's mutex.
    NRT_STATUS failed = NRT_SUCCESS;  // what the first launch that failed came to
    uint64_t   last   = 0;            // the number of its last launch
    uint64_t   graph  = 0;            // the number of the graph that is launched
};

// How many launches are in flight on a core at most, unless GGML_NEURON_QUEUE_DEPTH says otherwise. AWS advises to keep two or
// three requests queued.
constexpr size_t NEURON_QUEUE_DEPTH = 3;

class neuron_flights {
  public:
    neuron_flights(const neuron_nrt & nrt, int vnc, std::mutex & mutex);
    ~neuron_flights();
    neuron_flights(const neuron_flights &) = delete;

    // Returns whether a launch may still be computed when the function that launched it has returned.
    bool is_queue() const { return depth > 1; }

    // All that follow are called with the core's mutex held, and those that wait let go of it meanwhile.

    // Waits until there is room for one more. Call it before the step is looked at, since its model may be unloaded meanwhile.
    void make_room();

    // Waits when the runtime's own queue is full. As make_room, it lets go of the mutex.
    void wait_for_queue();

    // Launches a step, whose model is loaded. Returns what is known of it when it is launched: a launch that fails later
    // sets `stream.failed`. NRT_QUEUE_FULL: nothing was launched. One that would read what is lost is not launched. `node` is what it
    // computes.
    NRT_STATUS launch(neuron_step & step, neuron_stream & stream, const char * node);

    // Launches that were queued, and of these those that were while another was in flight.
    uint64_t queued() const { return n_launched; }

    uint64_t overlapping() const { return n_overlapping; }

    // Wait for launches: those that an access to memory must wait for, those of a stream, those before a number, one of a model.
    void wait_for_use(const neuron_use & use);

    void wait_for(const neuron_stream & stream) { wait_for(stream.last); }

    void wait_for(uint64_t number);

    void wait_for_all() { wait_for(n_launched); }

    // Returns whether a launch in flight uses a model, and the number of the last that does.
    bool uses(const void * model, uint64_t & number) const;

    // Returns whether what is in memory is not what was to be computed, because a launch failed after its graph was said to be
    // computed.
    bool is_lost(const neuron_use & use) const;

    // Makes bytes lost: what was to be copied there is.
    void lose(const neuron_use & use, neuron_stream & stream);

    // Forgets what the graph that a stream launches lost: its caller is told. What an earlier graph lost stays so.
    void forget_lost(const neuron_stream & stream);

    // Forgets what was in memory that is overwritten or freed.
    void forget_lost(const neuron_use & use);

  private:
    struct flight {
        uint64_t            number = 0;
        nrta_seq_t          seq    = 0;  // of nrta_execute_schedule
        bool                done   = false;
        NRT_STATUS          status = NRT_SUCCESS;
        const neuron_step * step   = nullptr;
        neuron_stream *     stream = nullptr;
        uint64_t            graph  = 0;  // of the stream
        std::string         node;
    };

    struct lost_use {
        neuron_use use;
        uint64_t   stream;  // its id
        uint64_t   graph;
    };

    bool reads_lost(const neuron_step & step, const char * node) const;

    NRT_STATUS schedule(neuron_step & step, flight & f);
    NRT_STATUS execute(neuron_step & step, flight & f);
    void       wait_for_first();
    void       wait_completed(nrta_seq_t seq);
    bool       is_completed(flight & f) const;
    void       reap();
    void       land(flight & f);
    NRT_STATUS judge(const flight & f, const char * function);
    int        take_event();

    const neuron_nrt &                  nrt;
    const int                           vnc;
    std::mutex &                        mutex;
    const size_t                        depth;
    size_t                              room = depth;  // what the runtime's queue takes of it
    std::deque<std::unique_ptr<flight>> flights;       // in order
    std::vector<lost_use>               lost;
    std::vector<int>                    events;        // eventfds that nobody waits for
    std::condition_variable_any         executed;      // nrt_execute returned
    uint64_t                            n_launched        = 0;
    uint64_t                            n_overlapping     = 0;
    bool                                said_not_a_number = false;
};
