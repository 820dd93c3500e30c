// The queues of one NeuronCore: launches and transfers in flight, and waiting for them.
//
// A core computes launches in the order in which they are launched, so the host may launch a kernel while the kernel
// that computes its inputs is in flight. The host has no such order: before it reads or writes device memory, or frees
// memory that a launch uses, it waits for the launches that use it. Waiting unlocks the core's mutex: other threads
// read, write and allocate meanwhile.
//
// Transfers are copies and writes that a graph needs around its launches. The runtime has a queue of its own for them,
// and keeps the order within each queue, and not between two. So a transfer waits on the host for launches that use its
// bytes, and a launch for transfers. Transfers that follow one another do not wait.
//
// With nrta_execute_schedule (SDK 2.29 and later) up to GGML_NEURON_QUEUE_DEPTH launches are in flight. Without it, or
// with a depth of 1, nrt_execute computes one at a time, and transfers are calls that the host waits for.

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
#include <vector>

struct neuron_memory;
struct neuron_operand;
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

// A sequence of launches in order: the launches of one ggml backend.
struct neuron_stream {
    neuron_stream();

    const uint64_t id;  // unique in the process

    // Guarded by the core's mutex.
    NRT_STATUS failed = NRT_SUCCESS;  // the status of the first launch that failed
    uint64_t   last   = 0;            // the number of its last launch or transfer
    uint64_t   graph  = 0;            // the number of the current graph
};

// The most launches in flight on a core, unless GGML_NEURON_QUEUE_DEPTH sets another number. AWS advises two or three
// queued requests.
constexpr size_t NEURON_QUEUE_DEPTH = 3;

// Unlocks a mutex during its lifetime.
struct neuron_unlocked {
    explicit neuron_unlocked(std::mutex & mutex) : mutex(mutex) { mutex.unlock(); }

    ~neuron_unlocked() { mutex.lock(); }

    neuron_unlocked(const neuron_unlocked &) = delete;

    std::mutex & mutex;
};

// Returns the most launches in flight on a core with this runtime. With 1 the host waits for each launch.
size_t neuron_queue_depth(const neuron_nrt & nrt);

class neuron_launch_queue {
  public:
    neuron_launch_queue(const neuron_nrt & nrt, int vnc, std::mutex & mutex);
    ~neuron_launch_queue();
    neuron_launch_queue(const neuron_launch_queue &) = delete;

    // Returns whether a launch may still be in flight when `launch` returns.
    bool is_queue() const { return depth > 1; }

    // The caller of the functions below holds the core's mutex. Functions that wait unlock it meanwhile.

    // Returns whether the number of launches in flight is at its limit.
    bool is_full();

    // Waits for the first launch in flight. There must be one.
    void wait_for_first();

    // Waits while the runtime's own queue is full.
    void wait_for_queue();

    // Launches a bound kernel, whose model is loaded, for the stream's graph. Returns the status at the launch: a later
    // failure sets `stream.failed`. NRT_QUEUE_FULL: nothing was launched. A launch that would read poisoned bytes fails
    // instead. `node` describes the computed node.
    NRT_STATUS launch(neuron_bound_launch & bound_launch, neuron_stream & stream, const std::string & node);

    // Returns whether the runtime queues transfers.
    bool queues_transfers() const { return is_queue() && nrt.nrta_tensor_copy && nrt.nrta_tensor_write; }

    // Queue a transfer for the stream's graph, with the statuses of `launch`: a copy of `from.size` bytes within the
    // core's memory, and a write. They wait for conflicting launches, and for room in the runtime's queue.
    NRT_STATUS copy(const neuron_operand & from, const neuron_operand & to, neuron_stream & stream);
    NRT_STATUS write(std::vector<uint8_t> data, const neuron_operand & to, neuron_stream & stream);

    // Waits for a transfer that conflicts with these uses, other than the stream's `own`. Returns false when there is
    // none; the mutex stays locked then.
    bool wait_for_transfer(const std::vector<neuron_use> & uses, const neuron_stream * own = nullptr);

    // Numbers of launches queued in the runtime, and of launches queued while another was in flight.
    uint64_t queued() const { return n_launched; }

    uint64_t overlapping() const { return n_overlapping; }

    // Wait for launches and transfers: for all that conflict with an access, for all in a stream, and for all up to a
    // number.
    void wait_for_use(const neuron_use & use);

    // Returns whether an access to memory must wait.
    bool is_used(const neuron_use & use) const {
        return last_conflict(use) != 0 || last_transfer({ use }, nullptr) != 0;
    }

    void wait_for(const neuron_stream & stream) { wait_for(stream.last); }

    void wait_for(uint64_t number);

    void wait_for_all() { wait_for(last_number); }

    // Returns whether a launch in flight uses a model. Sets `number` to the last such launch.
    bool uses(const void * model, uint64_t & number) const;

    // Returns whether memory lacks its computed contents, because a launch failed after its graph was reported as
    // computed.
    bool is_poisoned(const neuron_use & use) const;

    // Marks bytes that failed work of a stream's graph would have written, and sets the stream's status.
    void poison(const std::vector<neuron_use> & uses, neuron_stream & stream, uint64_t graph, NRT_STATUS status);

    // Removes the marks of bytes that the stream's current graph poisoned: its caller receives the failure. Marks of
    // earlier graphs stay.
    void forget_poisoned(const neuron_stream & stream);

    // Removes the poisoned marks of bytes that are overwritten or freed.
    void forget_poisoned(const neuron_use & use);

  private:
    // A launch, or a transfer, in flight.
    struct request {
        uint64_t                    number       = 0;
        nrta_seq_t                  seq          = 0;        // the request's number from nrta_*
        NRT_STATUS                  status       = NRT_SUCCESS;
        const neuron_bound_launch * bound_launch = nullptr;  // NULL: a transfer
        neuron_stream *             stream       = nullptr;
        uint64_t                    graph        = 0;        // number of the stream's graph
        std::string                 node{};
        int64_t                     begin = 0;               // nanoseconds; 0 without profiling
        std::vector<neuron_use>     transferred{};           // of a transfer
        std::vector<uint8_t>        data{};                  // that a transfer writes

        const std::vector<neuron_use> & uses() const;
    };

    // A queue of the runtime. Its requests are completed in order.
    struct request_queue {
        std::deque<std::unique_ptr<request>> pending;

        // Requests that the runtime no longer has, in order. It may still write their status until a later one is
        // completed.
        std::deque<std::unique_ptr<request>> parked;
    };

    struct poisoned_range {
        neuron_use use;
        uint64_t   stream;  // the stream's id
        uint64_t   graph;
    };

    bool reads_poisoned(const neuron_bound_launch & bound_launch, const char * node) const;

    // The runtime's answer about a launch.
    enum class answer { PENDING, DONE, UNKNOWN };

    // Queues a transfer in the runtime.
    using transfer_call = std::function<NRT_STATUS(request & q)>;

    NRT_STATUS schedule(neuron_bound_launch & bound_launch, request & q);
    NRT_STATUS execute(neuron_bound_launch & bound_launch, request & q);
    NRT_STATUS transfer(std::unique_ptr<request> q, const char * function, const transfer_call & call);
    answer     ask(nrta_seq_t seq);
    answer     wait_completed(nrta_seq_t seq);
    void       wait_completed(const request_queue & queue, uint64_t number);
    void       reap();
    void       reap(request_queue & queue);
    void       complete(request & q, NRT_STATUS status, const char * function);
    void       widen();
    uint64_t   last_conflict(const neuron_use & use) const;
    uint64_t   last_transfer(const std::vector<neuron_use> & uses, const neuron_stream * own) const;
    bool       wait_for_conflict(const std::vector<neuron_use> & uses, const neuron_stream * own);
    void       profile(const request & q, NRT_STATUS status);
    NRT_STATUS judge(const request & q, NRT_STATUS status, const char * function);
    int        take_event();
    void       give_back(int event, nrta_seq_t seq, bool registered);

    const neuron_nrt &          nrt;
    const int                   vnc;
    std::mutex &                mutex;
    const size_t                depth;
    size_t                      room     = depth;  // limit of launches in the runtime's queue
    size_t                      n_fitted = 0;      // launches completed since the queue was full or `room` grew
    request_queue               launches;
    request_queue               transfers;
    std::vector<poisoned_range> poisoned;
    std::vector<int>            events;      // eventfds that no thread waits for
    bool                        has_events;  // the runtime signals eventfds
    std::condition_variable_any changed;     // signaled when nrt_execute returns
    uint64_t                    last_number       = 0;
    uint64_t                    n_launched        = 0;
    uint64_t                    n_overlapping     = 0;
    int64_t                     last_done         = 0;  // when the last profiled launch was found completed
    bool                        said_not_a_number = false;
    std::atomic<bool>           said_busy{ false };
};
