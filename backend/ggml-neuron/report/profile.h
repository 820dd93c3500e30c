// The launches of a process with their times, as a trace that Perfetto and Chrome open (GGML_NEURON_PROFILE).
//
// Format: "Trace Event Format", the JSON array form, which may lack its end: a process that is killed leaves a file that can be read.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct neuron_profiled_launch {
    int         core = 0;           // the NeuronCore
    std::string kernel;             // its id
    std::string node;               // what it computes
    size_t      bytes_read    = 0;  // of the memory that it is bound to
    size_t      bytes_written = 0;
    int64_t     begin         = 0;  // nanoseconds: launched, or when the launch before it was done
    int64_t     end           = 0;  // seen to be done
    bool        failed        = false;
};

// Returns whether GGML_NEURON_PROFILE is set and its file can be written.
bool neuron_profiling();

// Returns the time of a clock that never goes back, in nanoseconds.
int64_t neuron_profile_time();

// Writes a launch. Any thread may call it.
void neuron_profile(const neuron_profiled_launch & launch);
