// What the backend prints, all of it to stderr: errors and warnings always, details when GGML_NEURON_LOG asks for them.
//
// ggml's logger is not used: programs such as llama-bench silence it, and a run whose kernels are all left out would look
// like any other.

#pragma once

#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Returns whether GGML_NEURON_LOG asks for details: 1 or 2.
inline bool neuron_log_enabled() {
    static const bool enabled = [] {
        const char * value = getenv("GGML_NEURON_LOG");
        return value && (strcmp(value, "1") == 0 || strcmp(value, "2") == 0);
    }();
    return enabled;
}

// Returns whether it also asks for aids to debugging, and for each message as often as it comes: 2.
inline bool neuron_log_repeats() {
    static const bool repeats = neuron_log_enabled() && strcmp(getenv("GGML_NEURON_LOG"), "2") == 0;
    return repeats;
}

// Lines of one format that are printed, unless repeats are asked for.
constexpr int NEURON_MOST_LINES = 10;

// The end of a line in a part of a message, where an end of line would become a space: what libraries say may have several lines.
#define NEURON_NEXT_LINE "\v"

// Prints a message after "ggml-neuron: ". It has at most three lines, and the format ends each: what happened, why, and what to
// type. A message is printed once, and of messages with the same format, which differ in names and numbers, NEURON_MOST_LINES; then a
// line says that others are left out. Any thread may call it.
void neuron_say(const char * format, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

// Prints a message each time.
void neuron_say_again(const char * format, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

#define NEURON_LOG(...)                    \
    do {                                   \
        if (neuron_log_enabled()) {        \
            neuron_say_again(__VA_ARGS__); \
        }                                  \
    } while (0)

// What helps to find out why, and not what to do.
#define NEURON_DEBUG(...)                  \
    do {                                   \
        if (neuron_log_repeats()) {        \
            neuron_say_again(__VA_ARGS__); \
        }                                  \
    } while (0)

#define NEURON_ERROR(...) neuron_say(__VA_ARGS__)
#define NEURON_WARN(...)  neuron_say(__VA_ARGS__)
