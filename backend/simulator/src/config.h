// Settings from environment variables.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simulator {

// A kind of EC2 instance, as AWS describes it.
struct instance {
    const char * name;
    uint32_t     family;   // NRT_INSTANCE_TRN1 and so on, for nrt_get_instance_info
    uint32_t     size;     // the same
    uint32_t     version;  // of its NeuronCores
    uint32_t     lnc;      // physical cores of a logical one, the family's default
    uint32_t     cores;    // logical NeuronCores with that LNC
    size_t       memory;   // bytes of HBM per logical NeuronCore
    size_t       sbuf;     // bytes of a physical core's state buffer
};

struct config {
    uint32_t              total = 1;               // cores of the simulated instance
    std::vector<uint32_t> visible;                 // the cores of this process, by their number in the instance
    uint32_t              any_of       = 0;        // take this many free cores of `visible`; 0: take all of them
    size_t                memory       = 0;        // bytes per core
    size_t                host_memory  = 0;        // bytes for NEFFs and host tensors
    double                exec_timeout = 0;        // seconds; 0: none
    double                load_timeout = 1e9;      // seconds that loading waits for the other ranks: forever
    double                launch_us    = 0;        // microseconds that an execution takes before it begins
    double                gb_per_s     = 0;        // of tensors on the clock of price.h; 0: the target's rate
    bool                  priced       = false;    // an execution takes its target's time instead (price.h)
    const instance *      profile      = nullptr;  // NEURON_SIMULATOR_INSTANCE
    uint32_t              lnc          = 0;        // physical cores of a logical one; 0: any
    bool                  older_neffs  = false;    // NEURON_RT_ALLOW_LEGACY_NEFF
    bool                  strict       = true;     // refuse what AWS's documentation does not allow
    uint32_t              release      = 32;       // of the simulated SDK: 2.32
    size_t                page         = 0;        // NEURON_SCRATCHPAD_PAGE_SIZE, in bytes; 0: the release's
    uint32_t              queue        = 63;       // places for requests in a queue of nrta_*
    uint32_t              in_flight    = 0;        // NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS
    bool                  reports_nan  = false;    // NEURON_RT_NUMERICAL_ERRORS_VERBOSITY, NEURON_FAIL_ON_NAN
    std::string           fault;                   // NEURON_SIMULATOR_FAULT, a list for faults::read; empty: no faults
    size_t                slice_alignment = 1;     // bytes: other offsets of slices are refused
    std::string           lock_folder;  // processes with the same folder share an instance; empty: no sharing
    std::string           root_comm;    // NEURON_RT_ROOT_COMM_ID

    // Returns whether a tensor of 4 GiB or more overflows, as in releases before 2.28.
    bool overflows() const { return strict && release < 28; }

    // Return whether the release has nrta_* with a status of each request, and completion events.
    bool has_queues() const { return release >= 29; }

    bool has_events() const { return release >= 30; }

    // Return bytes: the part of a program's memory in the state buffer, the micro-code, and a page of the scratchpad.
    size_t state_buffer() const;
    size_t microcode() const;
    size_t scratchpad_page() const;

    // Returns how many seconds an execution waits for the other ranks. The default is AWS's documented default of
    // NEURON_RT_EXEC_TIMEOUT.
    double rank_timeout() const { return exec_timeout > 0 ? exec_timeout : 30; }

    // Returns whether nrt_execute returns before the execution is done.
    bool returns_early() const { return release < 32 && in_flight > 0; }

    // Returns how many logical cores share the memory of a group of physical ones, and each report all of it.
    uint32_t sharing() const { return profile != nullptr && lnc < profile->lnc ? profile->lnc / lnc : 1; }

    // Returns false, with the reason in `error`, if a variable has an invalid value.
    static bool read(config & out, std::string & error);
};

}  // namespace simulator
