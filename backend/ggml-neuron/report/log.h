// What the backend prints, all of it to stderr: errors and warnings always, details when GGML_NEURON_LOG asks for them.
//
// ggml's logger is not used: programs such as llama-bench silence it, and a run whose kernels are all left out would look
// like any other.

#pragma once

#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Returns whether GGML_NEURON_LOG asks for details.
inline bool neuron_log_enabled() {
    static const bool enabled = [] {
        const char * value = getenv("GGML_NEURON_LOG");
        return value && (strcmp(value, "1") == 0 || strcmp(value, "2") == 0);
    }();
    return enabled;
}

// Returns whether it also asks for what is otherwise said once to be said each time.
inline bool neuron_log_repeats() {
    static const bool repeats = neuron_log_enabled() && strcmp(getenv("GGML_NEURON_LOG"), "2") == 0;
    return repeats;
}

// Lines of one format that are printed, unless repeats are asked for.
constexpr int NEURON_MOST_LINES = 10;

// Prints a line, which ends the format, after "ggml-neuron: ". A line is printed once, and of lines with the same format, so
// that they differ in names and numbers, NEURON_MOST_LINES; then one that says that others are left out. Any thread may call it.
void neuron_say(const char * format, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

#define NEURON_LOG(...)                                   \
    do {                                                  \
        if (neuron_log_enabled()) {                       \
            fprintf(stderr, "ggml-neuron: " __VA_ARGS__); \
        }                                                 \
    } while (0)

#define NEURON_ERROR(...) neuron_say(__VA_ARGS__)
#define NEURON_WARN(...)  neuron_say(__VA_ARGS__)
