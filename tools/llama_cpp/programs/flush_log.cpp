// Linked into each program. A thread writes llama.cpp's log, and would lose the pending lines when the program ends.

#include "log.h"

#include <cstdlib>

static const int registered = std::atexit([] { common_log_flush(common_log_main()); });
