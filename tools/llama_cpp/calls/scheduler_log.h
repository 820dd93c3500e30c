// What the scheduler says of the graphs that it makes (GGML_SCHED_DEBUG=2).

#pragma once

#include "ggml.h"

#include <map>
#include <string>

struct assigned {
    long                        device = 0;
    long                        graphs = 0;
    std::map<std::string, long> cpu;  // by op, whose name is cut after ten characters
};

// Where the nodes of the graphs that this thread has made go; NULL: nowhere.
extern thread_local assigned * watched;

// For llama_log_set. Errors and warnings go to stderr.
void read_log(enum ggml_log_level level, const char * text, void * user_data);
