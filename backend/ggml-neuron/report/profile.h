// The launches of a process with their times, as a trace for Perfetto and Chrome (GGML_NEURON_PROFILE).
//
// Format: "Trace Event Format", in the JSON array form. The end may be missing, so the file of a killed process is
// readable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct neuron_profiled_launch {
    int         core = 0;           // number of the NeuronCore
    std::string kernel;             // the kernel's id
    std::string node;               // the computed node
    size_t      bytes_read    = 0;  // in the memory of its operands
    size_t      bytes_written = 0;
    int64_t     begin         = 0;  // nanoseconds: the launch, or the end of the launch before it if that is later
    int64_t     end           = 0;  // when it was found completed
    bool        failed        = false;
};

// Returns whether GGML_NEURON_PROFILE is set and its file can be written.
bool neuron_profiling();

// Returns the time of a monotonic clock in nanoseconds.
int64_t neuron_profile_time();

// Writes a launch. Any thread may call this.
void neuron_profile(const neuron_profiled_launch & launch);
