// What the backend prints: errors and warnings through ggml's logger, and what GGML_NEURON_LOG=1 asks for to stderr.

#pragma once

#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Returns whether GGML_NEURON_LOG asks for details. Programs such as llama-bench silence ggml's logger, and whoever sets
// the variable wants to read something: so these lines do not go through it.
inline bool neuron_log_enabled() {
    static const bool enabled = [] {
        const char * value = getenv("GGML_NEURON_LOG");
        return value && *value && strcmp(value, "0") != 0;
    }();
    return enabled;
}

// Returns whether it also asks for what is otherwise said once to be said each time.
inline bool neuron_log_repeats() {
    static const bool repeats = neuron_log_enabled() && strcmp(getenv("GGML_NEURON_LOG"), "2") == 0;
    return repeats;
}

#define NEURON_LOG(...)                                   \
    do {                                                  \
        if (neuron_log_enabled()) {                       \
            fprintf(stderr, "ggml-neuron: " __VA_ARGS__); \
        }                                                 \
    } while (0)

#define NEURON_ERROR(...) GGML_LOG_ERROR("ggml-neuron: " __VA_ARGS__)
#define NEURON_WARN(...)  GGML_LOG_WARN("ggml-neuron: " __VA_ARGS__)
