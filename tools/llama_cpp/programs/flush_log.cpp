// Linked into each program: llama.cpp's log is written by a thread, and loses what is waiting when a program ends.

#include "log.h"

#include <cstdlib>

static const int registered = std::atexit([] { common_log_flush(common_log_main()); });
