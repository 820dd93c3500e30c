#include "log.h"

#include <strings.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simulator {

static const char * const NAMES[] = { "ERROR", "WARNING", "INFO", "DEBUG" };

// Reads the environment once, because getenv races with a client's setenv.
static level asked_for() {
    const char * text = getenv("NEURON_RT_LOG_LEVEL");
    for (int i = 0; text != nullptr && i < 4; i++) {
        if (strcasecmp(text, NAMES[i]) == 0) {
            return static_cast<level>(i);
        }
    }
    if (text != nullptr && strcasecmp(text, "WARN") == 0) {
        return level::warning;
    }
    return level::error;
}

void log(level at, const char * where, const char * format, ...) {
    static const level most = asked_for();
    if (at > most) {
        return;
    }
    // One write per line, so that lines of different threads and of the helper do not mix.
    char    line[2048];
    int     used = snprintf(line, sizeof(line), "NRT simulator %s %s: ", NAMES[static_cast<int>(at)], where);
    va_list arguments;
    va_start(arguments, format);
    const int more = vsnprintf(line + used, sizeof(line) - used, format, arguments);
    va_end(arguments);
    used += more < 0 ? 0 : more;
    if (used > static_cast<int>(sizeof(line)) - 1) {
        used = sizeof(line) - 1;
    }
    line[used]      = '\n';
    const auto done = write(STDERR_FILENO, line, used + 1);
    (void) done;  // an error of the log has no other place to go
}

}  // namespace simulator
