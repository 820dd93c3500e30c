#include "runtime.h"

#include "../../nrt/nrt_api.h"
#include "fds.h"
#include "log.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace simulator {

static std::atomic<runtime *> current{ nullptr };

static void forked() {
    const bool open = current.load()->state == phase::open || current.load()->forked;
    simulator::close_all_fds();
    current                = new runtime;
    current.load()->forked = open;
}

// Prints a summary of each core's executions at the end of the process.
static void ended() {
    const runtime & rt = *current;
    for (size_t core = 0; core < rt.core_states.size(); core++) {
        const core_state & state = rt.core_states[core];
        log(level::info, "exit",
            "core %zu: %llu executions, which read %llu bytes of inputs and take %llu ns on a device; the host waited "
            "for %llu copies and writes, and queued %llu",
            core, static_cast<unsigned long long>(state.executions), static_cast<unsigned long long>(state.bytes_read),
            static_cast<unsigned long long>(state.clock_ns), static_cast<unsigned long long>(state.waited),
            static_cast<unsigned long long>(state.queued));
    }
}

runtime & process() {
    // A static variable's initializer runs once, even if several threads arrive first.
    static const bool made = [] {
        current = new runtime;
        pthread_atfork(nullptr, nullptr, forked);
        (void) std::atexit(ended);
        return true;
    }();
    (void) made;
    return *current;
}

NRT_STATUS closed_or_not_open(const runtime & rt, const char * where) {
    const bool closed = rt.state == phase::closed;
    log(level::error, where, closed ? "nrt_close was called before" : "nrt_init was not called in this process");
    return closed ? NRT_CLOSED : NRT_UNINITIALIZED;
}

NRT_STATUS invalid(const char * where, const char * what) {
    log(level::error, where, "%s", what);
    return NRT_INVALID;
}

NRT_STATUS invalid_handle(const char * where, const char * what) {
    log(level::error, where, "%s: not a handle, or freed", what);
    return NRT_INVALID_HANDLE;
}

NRT_STATUS core_status(runtime & rt, uint32_t core, const char * where) {
    if (rt.faults.empty() || core >= rt.cores()) {
        return NRT_SUCCESS;
    }
    simulator::core_state & state = rt.core_states[core];
    if (state.lost) {
        log(level::error, where, "core %u is lost (NEURON_SIMULATOR_FAULT)", core);
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    }
    const NRT_STATUS owed = state.owed.exchange(NRT_SUCCESS);
    if (owed != NRT_SUCCESS) {
        log(level::error, where, "an execution before failed (NEURON_SIMULATOR_FAULT=deferred)");
    }
    return owed;
}

bool is_out_of_memory(runtime & rt, const char * where) {
    const bool now = rt.faults.strikes("memory");
    if (now) {
        log(level::error, where, "no memory (NEURON_SIMULATOR_FAULT=memory)");
    }
    return now;
}

void check_freed(const runtime & rt, const void * handle, const char * where) {
    if (rt.state == phase::open && rt.config.strict && rt.units->freed(handle)) {
        log(level::error, where, "a request in flight uses it; that request fails");
    }
}

}  // namespace simulator
