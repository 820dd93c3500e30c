// The AWS Neuron Runtime, bound at run time: a program with this binding starts on a machine that has no libnrt.
//
//     std::string       message;
//     const neuron_nrt * nrt = neuron_nrt_get(message);
//     if (!nrt) {
//         ... no device: message holds the libraries that were tried and the reasons for rejecting them
//     }
//     message = nrt->init();  // claims the NeuronCores
//     if (!message.empty()) {
//         ... they are not available: message holds the reason
//     }
//     NRT_STATUS status = nrt->nrt_tensor_write(tensor, data, 0, size);
//     if (status != NRT_SUCCESS) {
//         fprintf(stderr, "%s\n", nrt->describe("nrt_tensor_write", status).c_str());
//     }
//
// The first call of `init` initializes libnrt, once in a process, and the exit of the process closes it. A program that
// only loads a plugin or lists its devices claims no NeuronCore.

#pragma once

#include "nrt_api.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

// The most NeuronCores that a process uses: ggml's scheduler takes 16 backends (GGML_SCHED_MAX_BACKENDS), and one is
// the CPU.
constexpr uint32_t NEURON_MAX_CORES = 15;

struct neuron_nrt {
    // nrt_api.h declares these functions. An optional one is null if the library lacks it.
#define NEURON_NRT_MEMBER(name) decltype(&::name) name = nullptr;
    NRT_FUNCTIONS_REQUIRED(NEURON_NRT_MEMBER)
    NRT_FUNCTIONS_OPTIONAL(NEURON_NRT_MEMBER)
#undef NEURON_NRT_MEMBER

    std::string   path;                // the library's file
    nrt_version_t version{};           // all zero if the library reports none
    bool          simulator  = false;
    bool          has_queues = false;  // nrta_execute_schedule with a status of each request: SDK 2.29 and later
    size_t        max_in_flight =
        0;  // NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS, if the library queues requests; 0: no limit set
    uint32_t    n_cores            = 0;      // NeuronCores of this process
    bool        has_selected_cores = false;  // NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES chooses them
    bool        is_limited         = false;  // the machine has more, which stay with other processes
    std::string target;                      // the target of NEFFs for this machine ("trn1"); empty when unknown
    uint32_t    lnc = 0;                     // physical cores per logical core; 0 when unknown
    std::string lnc_source;                  // what states it, for messages; empty when unknown

    // The number of live objects of the library. Code that creates an object that outlives a function counts it here.
    // At exit the library is closed only when there are none: freeing an object later would call into a closed library.
    mutable std::atomic<int> users{ 0 };

    // Returns "nrt_load failed: NRT_RESOURCE (4)".
    std::string describe(const char * function, NRT_STATUS status) const;

    // Initializes the library. Any thread may call this; the first call decides for the process. Returns "", or the
    // reason for a failure.
    const std::string & init() const;

    bool is_open() const { return open; }

    // Returns whether the process is a child of the one that loaded the library. The library's state is the parent's.
    bool is_forked() const;

    // Remarks for the user on how the library is used.
    std::vector<std::string> remarks;

  private:
    void initialize() const;

    mutable std::once_flag    once;
    mutable std::string       failure;
    mutable std::atomic<bool> open{ false };
    const int                 process = getpid();
};

// Returns the library, loaded and not initialized, or NULL with the reasons in `message`. The first call decides for
// the process.
//
// Initialization claims the NeuronCores that NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES names, or else all of the
// machine's. On a machine with more than NEURON_MAX_CORES it sets the second variable to that number first, unless the
// user chose cores. If the library does not report the machine's cores before initialization, the variables have to name
// them.
//
// It searches in this order: the file that GGML_NEURON_LIBNRT names (and then no other),
// /opt/aws/neuron/lib/libnrt.so.1, and libnrt.so.1 on the dynamic linker's path.
const neuron_nrt * neuron_nrt_get(std::string & message);
