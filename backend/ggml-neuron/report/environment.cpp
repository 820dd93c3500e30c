#include "report/environment.h"

#include "report/log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

// The backend's variables.
static const char * const VARIABLES[] = {
    "GGML_NEURON_BUFFERS",  "GGML_NEURON_COSTS",          "GGML_NEURON_EXACT",  "GGML_NEURON_FALLBACK_MEMORY",
    "GGML_NEURON_FUSION",   "GGML_NEURON_KERNEL_DIR",     "GGML_NEURON_LIBNRT", "GGML_NEURON_LOG",
    "GGML_NEURON_PROFILE",  "GGML_NEURON_QUEUE_DEPTH",    "GGML_NEURON_RECORD", "GGML_NEURON_REPACK",
    "GGML_NEURON_REPACKED", "GGML_NEURON_REPACK_THREADS", "GGML_NEURON_TARGET",
};

std::string neuron_variable(const char * name) {
    const char * value = getenv(name);
    return value ? value : "";
}

bool neuron_switch(const char * name, bool otherwise) {
    const std::string value = neuron_variable(name);
    if (value == "0" || value == "1") {
        return value == "1";
    }
    if (!value.empty()) {
        NEURON_WARN("%s is 0 or 1, not '%s'; using %d\n", name, value.c_str(), (int) otherwise);
    }
    return otherwise;
}

size_t neuron_number(const char * name, const char * what, size_t least, size_t most, size_t otherwise) {
    const std::string text = neuron_variable(name);
    if (text.empty()) {
        return otherwise;
    }
    char * end                     = nullptr;
    errno                          = 0;
    const unsigned long long value = strtoull(text.c_str(), &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < least || value > most) {
        NEURON_WARN("%s is %s, not '%s'; using %zu\n", name, what, text.c_str(), otherwise);
        return otherwise;
    }
    return (size_t) value;
}

bool neuron_any_variable() {
    return std::any_of(std::begin(VARIABLES), std::end(VARIABLES),
                       [](const char * name) { return !neuron_variable(name).empty(); });
}

void neuron_warn_of_unknown_variables() {
    const std::string log = neuron_variable("GGML_NEURON_LOG");
    if (!log.empty() && log != "0" && log != "1" && log != "2") {
        NEURON_WARN("GGML_NEURON_LOG is 0, 1 or 2, not '%s'; using 0\n", log.c_str());
    }
    for (char ** entry = environ; entry && *entry; entry++) {
        const std::string text = *entry;
        const std::string name = text.substr(0, std::min<size_t>(text.find('='), 100));
        if (name.rfind("GGML_NEURON_", 0) == 0 &&
            std::find(std::begin(VARIABLES), std::end(VARIABLES), name) == std::end(VARIABLES)) {
            NEURON_WARN("the variable %s has no meaning: docs/reference/environment.md lists all\n", name.c_str());
        }
    }
}
