// Reads the scheduler's log of the graphs that it makes (GGML_SCHED_DEBUG=2).

#pragma once

#include "ggml.h"

#include <map>
#include <string>

struct assigned {
    long                        device = 0;
    long                        graphs = 0;
    std::map<std::string, long> cpu;  // by op; the log cuts the name to ten characters
};

// Counts the nodes of the graphs that this thread makes; NULL: does not count.
extern thread_local assigned * watched;

// A callback for llama_log_set. Prints errors and warnings to stderr.
void read_log(enum ggml_log_level level, const char * text, void * user_data);
