#include "device/launch_queue.h"

#include "device/core.h"
#include "report/environment.h"
#include "report/log.h"
#include "report/profile.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

// The most requests in libnrt's queue.
static constexpr size_t MAX_DEPTH = 63;

// After a full queue, the backend tries one more launch after this many launches: the other requests may be done, or
// the programs may be smaller now.
static constexpr size_t WIDEN_AFTER = 32;

// Reads the most launches in flight. Reports an invalid value of the variable once.
static size_t read_depth() {
    static const size_t depth = [] {
        const std::string what = "a number from 1 to " + std::to_string(MAX_DEPTH);
        return neuron_number("GGML_NEURON_QUEUE_DEPTH", what.c_str(), 1, MAX_DEPTH, NEURON_QUEUE_DEPTH);
    }();
    return depth;
}

static uint64_t next_stream_id() {
    static std::atomic<uint64_t> next{ 1 };
    return next++;
}

neuron_stream::neuron_stream() : id(next_stream_id()) {}

// The user's limit for the runtime also applies.
size_t neuron_queue_depth(const neuron_nrt & nrt) {
    if (!nrt.has_queues) {
        return 1;
    }
    const size_t depth = read_depth();
    if (nrt.max_in_flight == 0 || nrt.max_in_flight >= depth) {
        return depth;
    }
    NEURON_LOG("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS allows %zu launches in flight, not %zu\n", nrt.max_in_flight,
               depth);
    return nrt.max_in_flight;
}

neuron_launch_queue::neuron_launch_queue(const neuron_nrt & nrt, int vnc, std::mutex & mutex) :
    nrt(nrt), vnc(vnc), mutex(mutex), depth(neuron_queue_depth(nrt)),
    has_events(nrt.nrta_event_register_seq_id_completion != nullptr) {}

neuron_launch_queue::~neuron_launch_queue() {
    for (const int event : events) {
        close(event);
    }
    for (request_queue * queue : { &launches, &transfers }) {
        for (auto & q : queue->parked) {
            q.release();  // the runtime may write to it until the process ends
        }
    }
}

const std::vector<neuron_use> & neuron_launch_queue::request::uses() const {
    return bound_launch ? bound_launch->uses : transferred;
}

static bool conflicts(const neuron_use & a, const neuron_use & b) {
    return neuron_overlap(a, b) && (a.written || b.written);
}

static void note_changes(const std::vector<neuron_use> & uses) {
    for (const neuron_use & use : uses) {
        if (use.written) {
            use.memory->note_change(use.offset, use.size);
        }
    }
}

static bool conflicts(const std::vector<neuron_use> & uses, const neuron_use & use) {
    return std::any_of(uses.begin(), uses.end(), [&use](const neuron_use & other) { return conflicts(other, use); });
}

//
// launching
//

bool neuron_launch_queue::is_full() {
    reap();
    return launches.pending.size() >= room;
}

void neuron_launch_queue::wait_for_queue() {
    if (!launches.pending.empty()) {
        room     = launches.pending.size();  // the number that the runtime accepted
        n_fitted = 0;
        wait_for_first();
        return;
    }
    // another library in the process fills the queue
    const neuron_unlocked unlocked(mutex);
    std::this_thread::sleep_for(std::chrono::microseconds(10));
}

NRT_STATUS neuron_launch_queue::launch(neuron_bound_launch & bound_launch,
                                       neuron_stream &       stream,
                                       const std::string &   node) {
    if (!poisoned.empty()) {
        if (reads_poisoned(bound_launch, node.c_str())) {
            return NRT_EXEC_COMPLETED_WITH_ERR;
        }
        for (const neuron_use & use : bound_launch.uses) {
            if (use.written) {
                forget_poisoned(use);
            }
        }
    }
    note_changes(bound_launch.uses);
    auto q          = std::make_unique<request>();
    q->bound_launch = &bound_launch;
    q->stream       = &stream;
    q->graph        = stream.graph;
    q->node         = node;
    q->number = stream.last = ++last_number;
    q->begin                = neuron_profiling() ? neuron_profile_time() : 0;
    n_launched++;
    return depth > 1 ? schedule(bound_launch, *q.release()) : execute(bound_launch, *q.release());
}

// Takes ownership of the launch.
NRT_STATUS neuron_launch_queue::schedule(neuron_bound_launch & bound_launch, request & q) {
    n_overlapping += !launches.pending.empty();
    launches.pending.emplace_back(&q);
    NRT_STATUS status = nrt.nrta_execute_schedule(bound_launch.model->handle, bound_launch.input, bound_launch.output,
                                                  0, &q.status, &q.seq);
    if (status == NRT_QUEUE_FULL) {
        launches.pending.pop_back();
        n_overlapping -= !launches.pending.empty();
        n_launched--;
        return status;
    }
    if (status != NRT_SUCCESS) {
        status = judge(q, status, "nrta_execute_schedule");
        launches.pending.pop_back();
    }
    return status;
}

// Takes ownership of the launch, and unlocks the mutex while the device computes.
NRT_STATUS neuron_launch_queue::execute(neuron_bound_launch & bound_launch, request & q) {
    launches.pending.emplace_back(&q);
    {
        const neuron_unlocked unlocked(mutex);
        q.status = nrt.nrt_execute(bound_launch.model->handle, bound_launch.input, bound_launch.output);
    }
    profile(q, q.status);
    const NRT_STATUS status = judge(q, q.status, "nrt_execute");
    launches.pending.pop_front();  // it is the only one
    changed.notify_all();
    return status;
}

// Queues a transfer in the runtime once no launch and no other stream's transfer conflicts with it.
NRT_STATUS neuron_launch_queue::transfer(std::unique_ptr<request> q,
                                         const char *             function,
                                         const transfer_call &    call) {
    neuron_stream & stream = *q->stream;
    request &       made   = *q;
    for (;;) {
        while (wait_for_conflict(made.transferred, &stream)) {
            // another thread may have queued more meanwhile
        }
        if (stream.failed != NRT_SUCCESS) {
            return stream.failed;
        }
        for (const neuron_use & use : made.transferred) {
            if (!use.written && is_poisoned(use)) {
                NEURON_ERROR("core %d: %zu bytes that are to be copied were not computed: a launch failed\n", vnc,
                             use.size);
                return NRT_EXEC_COMPLETED_WITH_ERR;
            }
        }
        const NRT_STATUS status = call(made);
        if (status == NRT_SUCCESS) {
            break;
        }
        if (status != NRT_QUEUE_FULL) {
            return judge(made, status, function);
        }
        if (transfers.pending.empty()) {  // another library in the process fills the queue
            const neuron_unlocked unlocked(mutex);
            std::this_thread::sleep_for(std::chrono::microseconds(10));
        } else {
            wait_completed(transfers.pending.front()->seq);
            reap();
        }
    }
    for (const neuron_use & use : made.transferred) {
        if (use.written) {
            forget_poisoned(use);
        }
    }
    note_changes(made.transferred);
    made.number = stream.last = ++last_number;
    transfers.pending.push_back(std::move(q));
    return NRT_SUCCESS;
}

NRT_STATUS neuron_launch_queue::copy(const neuron_operand & from, const neuron_operand & to, neuron_stream & stream) {
    auto q         = std::make_unique<request>();
    q->stream      = &stream;
    q->graph       = stream.graph;
    q->transferred = {
        { from.memory, from.offset, from.size, false },
        { to.memory,   to.offset,   from.size, true  },
    };
    return transfer(std::move(q), "nrta_tensor_copy", [&](request & made) {
        return nrt.nrta_tensor_copy(from.memory->tensor, from.offset, to.memory->tensor, to.offset, from.size, 0,
                                    &made.status, &made.seq);
    });
}

NRT_STATUS neuron_launch_queue::write(std::vector<uint8_t> data, const neuron_operand & to, neuron_stream & stream) {
    auto q         = std::make_unique<request>();
    q->stream      = &stream;
    q->graph       = stream.graph;
    q->data        = std::move(data);
    q->transferred = {
        { to.memory, to.offset, q->data.size(), true },
    };
    return transfer(std::move(q), "nrta_tensor_write", [&](request & made) {
        return nrt.nrta_tensor_write(to.memory->tensor, made.data.data(), to.offset, made.data.size(), 0, &made.status,
                                     &made.seq);
    });
}

uint64_t neuron_launch_queue::last_transfer(const std::vector<neuron_use> & uses, const neuron_stream * own) const {
    uint64_t number = 0;
    for (const auto & q : transfers.pending) {
        const bool conflicting =
            q->stream != own && std::any_of(q->transferred.begin(), q->transferred.end(),
                                            [&](const neuron_use & use) { return conflicts(uses, use); });
        number = conflicting ? q->number : number;
    }
    return number;
}

bool neuron_launch_queue::wait_for_transfer(const std::vector<neuron_use> & uses, const neuron_stream * own) {
    const uint64_t number = last_transfer(uses, own);
    if (number) {
        wait_completed(transfers, number);
        reap();
    }
    return number != 0;
}

// Writes a completed launch to the profile. A core computes one launch at a time, so a launch begins no earlier than
// the end of the one before it.
void neuron_launch_queue::profile(const request & q, NRT_STATUS status) {
    if (!q.begin) {
        return;
    }
    neuron_profiled_launch launch;
    launch.core   = vnc;
    launch.kernel = q.bound_launch->model->kernel.id();
    launch.node   = q.node;
    launch.begin  = std::max(q.begin, last_done);
    launch.end = last_done = neuron_profile_time();
    launch.failed          = status != NRT_SUCCESS && status != NRT_EXEC_COMPLETED_WITH_NUM_ERR;
    for (const neuron_use & use : q.bound_launch->uses) {
        (use.written ? launch.bytes_written : launch.bytes_read) += use.size;
    }
    neuron_profile(launch);
}

// Reports an execution that did not fully succeed, and returns its status for ggml.
NRT_STATUS neuron_launch_queue::judge(const request & q, NRT_STATUS status, const char * function) {
    // The result is complete and has infinities or NaNs. ggml's ops pass them on, and so does the backend.
    if (status == NRT_EXEC_COMPLETED_WITH_NUM_ERR) {
        if (!said_not_a_number) {
            // The core keeps this report, so it may belong to an earlier process.
            NEURON_WARN("core %d: %s, for node %s, or a program before it: the results contain infinities or NaN\n",
                        vnc, q.bound_launch->model->name.c_str(), q.node.c_str());
            said_not_a_number = true;
        }
        return NRT_SUCCESS;
    }
    if (status != NRT_SUCCESS && !q.bound_launch) {
        NEURON_ERROR("core %d: %s: %zu bytes\n", vnc, nrt.describe(function, status).c_str(), q.transferred[0].size);
    } else if (status != NRT_SUCCESS) {
        NEURON_ERROR("core %d: %s: %s, for node %s\n", vnc, nrt.describe(function, status).c_str(),
                     q.bound_launch->model->name.c_str(), q.node.c_str());
    }
    return status;
}

//
// waiting
//

// Queries the runtime for a launch; any thread may call this. AWS documents NRT_INVALID for a launch that the runtime
// does not have; a closed library has no launches. With any other error the launch is not complete: the device may
// write its results, and the runtime its status.
neuron_launch_queue::answer neuron_launch_queue::ask(nrta_seq_t seq) {
    bool             completed = false;
    const NRT_STATUS status    = nrt.nrta_is_completed(seq, &completed);
    if (status == NRT_INVALID || status == NRT_CLOSED) {
        return answer::UNKNOWN;
    }
    if (status != NRT_SUCCESS && !said_busy.exchange(true)) {
        NEURON_WARN("core %d: %s: the launch counts as not done\n", vnc,
                    nrt.describe("nrta_is_completed", status).c_str());
    }
    return status == NRT_SUCCESS && completed ? answer::DONE : answer::PENDING;
}

// Removes completed requests, and requests that the runtime no longer has, which count as failed.
void neuron_launch_queue::reap() {
    if (depth > 1) {  // else the thread that called nrt_execute removes its launch
        reap(launches);
        reap(transfers);
    }
}

void neuron_launch_queue::reap(request_queue & queue) {
    while (!queue.pending.empty()) {
        request &    q    = *queue.pending.front();
        const answer said = ask(q.seq);
        if (said == answer::PENDING) {
            return;
        }
        if (said == answer::DONE) {
            complete(q, q.status,
                     q.bound_launch   ? "nrta_execute_schedule"
                     : q.data.empty() ? "nrta_tensor_copy"
                                      : "nrta_tensor_write");
            queue.parked.clear();  // requests are completed in order
            if (q.bound_launch) {
                widen();
            }
        } else {
            complete(q, NRT_INVALID, "nrta_is_completed");
            queue.parked.push_back(std::move(queue.pending.front()));
        }
        queue.pending.pop_front();
    }
}

// Raises `room` by one launch after enough launches fitted.
void neuron_launch_queue::widen() {
    if (room < depth && ++n_fitted >= WIDEN_AFTER) {
        room++;
        n_fitted = 0;
    }
}

// Handles a launch's status. After a failure the bytes that it would have written are poisoned, and bytes that later
// launches of its stream computed from them.
void neuron_launch_queue::complete(request & q, NRT_STATUS status, const char * function) {
    profile(q, status);
    neuron_stream & stream = *q.stream;
    status                 = judge(q, status, function);
    if (status != NRT_SUCCESS || stream.failed != NRT_SUCCESS) {
        poison(q.uses(), stream, q.graph, status);
    }
}

void neuron_launch_queue::wait_for_first() {
    if (depth == 1) {
        changed.wait(mutex);
        return;
    }
    const nrta_seq_t seq = launches.pending.front()->seq;
    wait_completed(seq);
    reap();
}

int neuron_launch_queue::take_event() {
    if (events.empty()) {
        return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    }
    const int event = events.back();
    events.pop_back();
    return event;
}

// Returns an eventfd to the pool. The runtime keeps a reference to a registered eventfd, and may signal it after it
// reports the launch as completed.
void neuron_launch_queue::give_back(int event, nrta_seq_t seq, bool registered) {
    if (registered && nrt.nrta_event_register_seq_id_completion(seq, -1) != NRT_SUCCESS) {
        has_events = false;  // and this one stays open
        return;
    }
    eventfd_t count = 0;
    eventfd_read(event, &count);
    events.push_back(event);
}

// Waits with the mutex unlocked. For the first microseconds it polls without sleeping.
neuron_launch_queue::answer neuron_launch_queue::wait_completed(nrta_seq_t seq) {
    const int event      = has_events ? take_event() : -1;
    bool      registered = false;
    answer    said;
    {
        const neuron_unlocked unlocked(mutex);
        bool                  signals = event >= 0;
        for (int tries = 0; (said = ask(seq)) == answer::PENDING; tries++) {
            if (tries < 4) {
                std::this_thread::yield();
            } else if (!signals) {
                std::this_thread::sleep_for(std::chrono::microseconds(5));
            } else if (!registered) {
                // then queries once more: AWS does not document a registration for a completed launch
                registered = signals = nrt.nrta_event_register_seq_id_completion(seq, event) == NRT_SUCCESS;
            } else {
                pollfd    wanted = { event, POLLIN, 0 };
                eventfd_t count  = 0;
                // only briefly: another thread that waited for this launch may have unregistered the eventfd
                if (poll(&wanted, 1, 10) > 0) {
                    eventfd_read(event, &count);
                }
            }
        }
    }
    if (event >= 0) {
        give_back(event, seq, registered);
    }
    return said;
}

void neuron_launch_queue::wait_for(uint64_t number) {
    for (;;) {
        reap();
        const auto pends = [number](const request_queue & queue) {
            return std::any_of(queue.pending.begin(), queue.pending.end(),
                               [number](const auto & q) { return q->number <= number; });
        };
        if (!pends(launches) && !pends(transfers)) {
            return;
        }
        if (depth == 1) {
            changed.wait(mutex);
            continue;
        }
        wait_completed(pends(launches) ? launches : transfers, number);
    }
}

// Waits for a queue's requests up to a number. There must be one.
void neuron_launch_queue::wait_completed(const request_queue & queue, uint64_t number) {
    // the last of the requests to wait for: they are completed in order
    nrta_seq_t seq = queue.pending.front()->seq;
    for (const auto & q : queue.pending) {
        seq = q->number <= number ? q->seq : seq;
    }
    if (wait_completed(seq) == answer::UNKNOWN && !queue.pending.empty()) {
        wait_completed(queue.pending.front()->seq);  // the runtime may still have the requests before it
    }
}

// Returns the number of the last launch that an access must wait for, or 0.
uint64_t neuron_launch_queue::last_conflict(const neuron_use & use) const {
    uint64_t number = 0;
    for (const auto & q : launches.pending) {
        number = conflicts(q->bound_launch->uses, use) ? q->number : number;
    }
    return number;
}

// Returns false when there is nothing to wait for; the mutex stays locked then. `own`: transfers of this stream do not
// count.
bool neuron_launch_queue::wait_for_conflict(const std::vector<neuron_use> & uses, const neuron_stream * own) {
    for (const neuron_use & use : uses) {
        if (const uint64_t number = last_conflict(use)) {
            wait_for(number);
            return true;
        }
    }
    return wait_for_transfer(uses, own);
}

void neuron_launch_queue::wait_for_use(const neuron_use & use) {
    while (wait_for_conflict({ use }, nullptr)) {
        // another thread may have queued more meanwhile
    }
}

bool neuron_launch_queue::uses(const void * model, uint64_t & number) const {
    number = 0;
    for (const auto & q : launches.pending) {
        number = q->bound_launch->model == model ? q->number : number;
    }
    return number > 0;
}

//
// poisoned bytes
//

bool neuron_launch_queue::is_poisoned(const neuron_use & use) const {
    return std::any_of(poisoned.begin(), poisoned.end(),
                       [&use](const poisoned_range & l) { return neuron_overlap(l.use, use); });
}

// Reports a launch that reads poisoned bytes.
bool neuron_launch_queue::reads_poisoned(const neuron_bound_launch & bound_launch, const char * node) const {
    const bool reads = std::any_of(bound_launch.uses.begin(), bound_launch.uses.end(),
                                   [this](const neuron_use & use) { return !use.written && is_poisoned(use); });
    if (reads) {
        NEURON_ERROR("core %d: %s, for node %s, is not launched\n"
                     "it reads a result of an earlier graph whose launch failed\n"
                     "set that memory, or make a new context\n",
                     vnc, bound_launch.model->name.c_str(), node);
    }
    return reads;
}

// Marks bytes that failed work of a stream's graph would have written.
void neuron_launch_queue::poison(const std::vector<neuron_use> & uses,
                                 neuron_stream &                 stream,
                                 uint64_t                        graph,
                                 NRT_STATUS                      status) {
    if (stream.failed == NRT_SUCCESS) {
        stream.failed = status;
    }
    for (const neuron_use & use : uses) {
        if (use.written) {
            poisoned.push_back({ use, stream.id, graph });
        }
    }
}

void neuron_launch_queue::forget_poisoned(const neuron_stream & stream) {
    poisoned.erase(
        std::remove_if(poisoned.begin(), poisoned.end(),
                       [&](const poisoned_range & l) { return l.stream == stream.id && l.graph == stream.graph; }),
        poisoned.end());
}

void neuron_launch_queue::forget_poisoned(const neuron_use & use) {
    std::vector<poisoned_range> left;
    for (const poisoned_range & l : poisoned) {
        if (!neuron_overlap(l.use, use)) {
            left.push_back(l);
            continue;
        }
        const size_t end      = l.use.offset + l.use.size;
        const size_t last     = use.offset + use.size;
        const auto   add_part = [&](size_t begin, size_t behind) {
            left.push_back(l);
            left.back().use.offset = begin;
            left.back().use.size   = behind - begin;
        };
        if (l.use.offset < use.offset) {
            add_part(l.use.offset, use.offset);
        }
        if (last < end) {
            add_part(last, end);
        }
    }
    poisoned = std::move(left);
}
