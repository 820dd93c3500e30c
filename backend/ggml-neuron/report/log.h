// The backend's output, all to stderr: errors and warnings always, a summary of the run if GGML_NEURON_LOG is 1, and
// each load and query if it is 2.
//
// It does not use ggml's logger: programs such as llama-bench silence that, and a run without any usable kernel would
// look like any other.

#pragma once

#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Returns whether GGML_NEURON_LOG is 1 or 2.
inline bool neuron_log_enabled() {
    static const bool enabled = [] {
        const char * value = getenv("GGML_NEURON_LOG");
        return value && (strcmp(value, "1") == 0 || strcmp(value, "2") == 0);
    }();
    return enabled;
}

// Returns whether GGML_NEURON_LOG is 2, which adds debugging aids and prints each message at every occurrence.
inline bool neuron_log_repeats() {
    static const bool repeats = neuron_log_enabled() && strcmp(getenv("GGML_NEURON_LOG"), "2") == 0;
    return repeats;
}

// The most lines of one format, unless messages repeat.
constexpr int NEURON_MOST_LINES = 10;

// A line break inside an argument of a message, where a newline would become a space: messages of libraries may have
// several lines.
#define NEURON_NEXT_LINE "\v"

// Prints a message after "ggml-neuron: ". It has at most three lines, each ended in the format: the event, the reason,
// and the command to type. Equal messages are printed once. Messages of one format, with different names and numbers,
// are printed NEURON_MOST_LINES times; then a line says that others are left out. Any thread may call this.
void neuron_say(const char * format, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

// Prints a message at each call.
void neuron_say_again(const char * format, ...) GGML_ATTRIBUTE_FORMAT(1, 2);

#define NEURON_LOG(...)                    \
    do {                                   \
        if (neuron_log_enabled()) {        \
            neuron_say_again(__VA_ARGS__); \
        }                                  \
    } while (0)

// Single events, such as loads, and details that help to find a cause.
#define NEURON_DEBUG(...)                  \
    do {                                   \
        if (neuron_log_repeats()) {        \
            neuron_say_again(__VA_ARGS__); \
        }                                  \
    } while (0)

#define NEURON_ERROR(...) neuron_say(__VA_ARGS__)
#define NEURON_WARN(...)  neuron_say(__VA_ARGS__)
