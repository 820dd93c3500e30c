// The AWS Neuron Runtime, bound at run time: a program that uses this starts on a machine that has no libnrt.
//
//     std::string       message;
//     const neuron_nrt * nrt = neuron_nrt_get(message);
//     if (!nrt) {
//         ... no device: message says which libraries were tried and why none was good
//     }
//     message = nrt->init();  // claims the NeuronCores
//     if (!message.empty()) {
//         ... they are not available: message says why
//     }
//     NRT_STATUS status = nrt->nrt_tensor_write(tensor, data, 0, size);
//     if (status != NRT_SUCCESS) {
//         fprintf(stderr, "%s\n", nrt->describe("nrt_tensor_write", status).c_str());
//     }
//
// libnrt is initialized once in a process, by the first call of `init`, and closed once, when the process exits: until then a
// program that only loads a plugin, or lists its devices, claims no NeuronCore.

#pragma once

#include "nrt_api.h"

#include <atomic>
#include <mutex>
#include <string>

// NeuronCores that a process uses at most: ggml's scheduler takes 16 backends (GGML_SCHED_MAX_BACKENDS), the CPU among them.
constexpr uint32_t NEURON_MAX_CORES = 15;

struct neuron_nrt {
    // As nrt_api.h declares them; the optional ones are null where the library lacks them.
#define NEURON_NRT_MEMBER(name) decltype(&::name) name = nullptr;
    NRT_FUNCTIONS_REQUIRED(NEURON_NRT_MEMBER)
    NRT_FUNCTIONS_OPTIONAL(NEURON_NRT_MEMBER)
#undef NEURON_NRT_MEMBER

    std::string   path;                // the library's file
    nrt_version_t version{};           // all zero when the library does not tell
    bool          simulator  = false;
    bool          has_queues = false;  // nrta_execute_schedule with a status of each request: SDK 2.29 and later
    size_t        max_in_flight =
        0;  // what NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS says, where requests are queued; 0: nothing
    uint32_t    n_cores = 0;  // NeuronCores of this process
    std::string target;       // what a NEFF must be compiled for ("trn1"); empty when unknown

    // Objects of the library that are alive: it is closed at exit only when there are none, since what frees one later
    // would call into a closed library. Who creates one that outlives a function counts it.
    mutable std::atomic<int> users{ 0 };

    // Returns "nrt_load failed: NRT_RESOURCE (4)".
    std::string describe(const char * function, NRT_STATUS status) const;

    // Initializes the library. The first call decides for the process; any thread may make it. Returns "", or why it failed.
    const std::string & init() const;

    bool is_open() const { return open; }

    // What the user should know of how the library is used; "" when it is nothing.
    std::string remark;

  private:
    void initialize() const;

    mutable std::once_flag    once;
    mutable std::string       failure;
    mutable std::atomic<bool> open{ false };
};

// Returns the library, loaded, or NULL: then `message` says why. The first call decides for the process.
//
// It is not initialized yet, unless it says only then how many NeuronCores there are, or what machine this is. Initializing it claims NeuronCores: those that NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES names, else all of the machine. On a
// machine that has more than NEURON_MAX_CORES the second variable is set to that number, unless the user set one of them.
//
// Searched in this order: the file that GGML_NEURON_LIBNRT names (and then no other), /opt/aws/neuron/lib/libnrt.so.1, and
// libnrt.so.1 wherever the dynamic linker finds it.
const neuron_nrt * neuron_nrt_get(std::string & message);
