// The process's state, and the objects behind the handles of libnrt's functions.
//
// State is one object per process. It is never destroyed, because a client may call in from its own exit handlers, and a child
// of fork starts with a new one: the parent's tensors and helper are not the child's.

#pragma once

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "config.h"
#include "faults.h"
#include "fds.h"
#include "handles.h"
#include "helper.h"
#include "log.h"
#include "programs.h"
#include "ranks.h"
#include "units.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct nrt_tensor {
    nrt_tensor(std::shared_ptr<simulator::memory> memory, size_t offset, size_t size, const char * name) :
        memory(std::move(memory)), offset(offset), size(size), name(name == nullptr ? "" : name) {}

    const std::shared_ptr<simulator::memory> memory;
    const size_t                             offset;  // in `memory`
    const size_t                             size;
    const std::string                        name;

    uint8_t * data() const { return memory->data() + offset; }

    uint32_t arena() const { return memory->in().index(); }

    // Returns the offset in the arena, by which the helper finds the tensor.
    size_t position() const { return memory->offset() + offset; }

    bool holds(size_t at, size_t bytes) const { return at <= size && bytes <= size - at; }
};

// Tensors by name. Thread-safe. A set owns no tensor, so that the use of a freed tensor is detected.
struct nrt_tensor_set {
    void put(const char * name, const std::shared_ptr<nrt_tensor> & tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto & [own, old] : tensors_) {
            if (own == name) {
                old = tensor;
                return;
            }
        }
        tensors_.emplace_back(name, tensor);
    }

    // Returns false if the set has no tensor of this name; `out` is null if the tensor was freed.
    bool find(const char * name, std::shared_ptr<nrt_tensor> & out) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & [own, tensor] : tensors_) {
            if (own == name) {
                out = tensor.lock();
                return true;
            }
        }
        return false;
    }

  private:
    mutable std::mutex                                             mutex_;
    std::vector<std::pair<std::string, std::weak_ptr<nrt_tensor>>> tensors_;
};

namespace simulator {

struct tensor_info {
    std::string           name;
    nrt_tensor_usage_t    usage;
    nrt_dtype_t           dtype;
    size_t                size;
    int32_t               alias;                    // of an output: the input whose memory it overwrites, or -1
    std::vector<uint32_t> shape;
    bool                  is_intermediate = false;  // passes values between subgraphs; the helper does not know it
};

}  // namespace simulator

struct nrt_model {
    ~nrt_model() {
        if (programs) {
            programs->remove(size, scratchpad);
        }
    }

    uint32_t                             core;
    std::shared_ptr<simulator::programs> programs;          // the core's; null until they have counted this one
    size_t                               size       = 0;    // counted bytes of its code and rings
    size_t                               scratchpad = 0;    // counted bytes of its scratchpad
    std::shared_ptr<simulator::memory>   neff;              // kept for a helper that is started later
    size_t                               neff_size;
    std::vector<simulator::tensor_info>  tensors;           // inputs, then outputs
    size_t                               needed       = 0;  // bytes besides the tensors
    size_t                               code         = 0;  // bytes of its code and rings
    uint64_t                             descriptors  = 0;  // DMA descriptors
    uint32_t                             core_version = 0;  // the version that it was compiled for; 0: unknown
    uint32_t                             ranks        = 0;  // ranks that loaded it together; 0: loaded by nrt_load
    uint32_t                             rank         = 0;
    uint32_t                             collectives  = 0;  // the number of its collectives

    std::shared_ptr<simulator::group> group;                // these ranks

    std::mutex mutex;
    uint64_t   helper_number = 0;  // the helper that has loaded it
    uint64_t   number        = 0;  // the model's number in that helper
};

namespace simulator {

// State of a core that outlives executions.
struct core_state {
    std::atomic<bool>       saw_nan{ false };  // an execution produced a NaN: all later ones report it
    std::atomic<bool>       lost{ false };     // NEURON_SIMULATOR_FAULT
    std::atomic<bool>       wedged{ false };   // a collective failed: all later ones of this core fail
    std::atomic<NRT_STATUS> owed{
        NRT_SUCCESS
    };  // with the same fault: the status of an earlier execution, which the next call returns
    std::mutex                      mutex;
    std::deque<std::vector<size_t>> rings;            // guarded by the mutex: models and tensors of the last executions
    std::atomic<uint64_t>           clock_ns{ 0 };    // the time of its executions on a device (price.h)
    std::atomic<uint64_t>           executions{ 0 };
    std::atomic<uint64_t>           bytes_read{ 0 };  // inputs that executions do not overwrite
    std::atomic<uint64_t>           waited{ 0 };      // copies on the core, and writes, that the host waited for
    std::atomic<uint64_t>           queued{ 0 };      // those of nrta_*
};

enum class phase { fresh, open, closed };

struct runtime {
    std::atomic<phase>                                state{ phase::fresh };
    std::mutex                                        mutex;  // for nrt_init and nrt_close
    simulator::config                                 config;
    simulator::faults                                 faults;
    std::vector<std::shared_ptr<simulator::arena>>    arenas;  // one per visible core, then the host's
    simulator::handles<nrt_tensor>                    tensors;
    simulator::handles<nrt_tensor_set>                sets;
    simulator::handles<nrt_model>                     models;
    std::vector<simulator::unique_fd>                 locks;        // of the visible cores
    std::vector<std::shared_ptr<simulator::programs>> programs;     // by core
    std::vector<simulator::core_state>                core_states;  // by core
    bool forked = false;                              // the process is a child of one that called nrt_init
    bool second = false;                              // another process had a core of this machine before

    std::unique_ptr<simulator::units> units;          // the nrta_* queues, from one nrt_init to the next
    simulator::ranks                  ranks;          // the cores of this process that compute together

    std::mutex                         helper_mutex;  // guards the members below
    std::shared_ptr<simulator::helper> helper;

    std::chrono::steady_clock::time_point not_before;  // no helper is started until then

    const std::shared_ptr<simulator::arena> & host() const { return arenas.back(); }

    uint32_t cores() const { return static_cast<uint32_t>(config.visible.size()); }
};

runtime & process();

NRT_STATUS closed_or_not_open(const runtime & rt, const char * where);

NRT_STATUS invalid(const char * where, const char * what);

NRT_STATUS invalid_handle(const char * where, const char * what);

// Runs `body` on the open runtime. Catches all exceptions: the C++ library only throws for lack of memory.
template <typename F> NRT_STATUS with_runtime(const char * where, F body) {
    try {
        runtime & rt = process();
        return rt.state == phase::open ? body(rt) : closed_or_not_open(rt, where);
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

// Runs `body` with the settings of the environment. Works before nrt_init, but not after nrt_close.
template <typename F> NRT_STATUS with_config(const char * where, F body) {
    try {
        if (process().state == phase::closed) {
            return closed_or_not_open(process(), where);
        }
        simulator::config config;
        std::string       error;
        if (!simulator::config::read(config, error)) {
            return invalid(where, error.c_str());
        }
        simulator::faults faults;
        faults.read(config.fault, error);
        if (process().state != phase::open && faults.strikes("early")) {
            return closed_or_not_open(process(), where);
        }
        body(config);
        return NRT_SUCCESS;
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

// Returns the pending error of a core or of the host: that the core is lost, or the status of an earlier execution.
NRT_STATUS core_status(runtime & rt, uint32_t core, const char * where);

// Checks a device's number among the devices that compute together, on a core of this process (-1: any). Returns the
// status.
NRT_STATUS check_ranks(runtime & rt, int32_t vnc, uint32_t rank, uint32_t count, const char * where);

// Returns whether ranks in their order can be on these cores of the process; logs an error otherwise.
bool are_cores_of_ranks(const runtime & rt, const std::vector<uint32_t> & cores, const char * where);

// Returns whether to fail an allocation, and logs it.
bool is_out_of_memory(runtime & rt, const char * where);

// Reports a handle that is freed while a request in flight uses it; the request keeps the object until it is done.
void check_freed(const runtime & rt, const void * handle, const char * where);

}  // namespace simulator
